"""Run folders as fedllm.experiment.run leaves them, made in no time, for the tests of what reads them."""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from fedllm.config.recipe import load_recipe
from fedllm.reporting.groups import group_runs
from fedllm.reporting.summary import summarise
from fedllm.results.format import COSTS
from fedllm.results.reader import read_runs

SCORES = (0.5, 0.7, 0.9, 0.8)


def make_run(
    folder: Path, *overrides: str, scores=SCORES, algorithm="fadamgc", task="glue/sst2", metric="accuracy",
    target: float | None = 0.85, seed=0, finished=True, torn=False, simulated=3.0, memory: int | None = 50_000_000,
    counts: Sequence[Sequence[int]] = (), classes: Sequence[str] = ("negative", "positive"),
    start: dict[str, float] | None = None, precision: str | None = None, version: str | None = None,
    train: str | None = None, digests: Sequence[str] = (), checkpoint: bool = False,
    told: dict[str, object] | None = None, answers: Sequence[dict[str, object]] = (), **measures: Sequence[object],
) -> Path:  # fmt: skip
    """A run folder; round t sends 1000 bytes up, 500 down, and takes 2 s, simulated 3 s.

    scores: the headline metric of each round, None for a round without an evaluation. memory: client_memory_bytes, None
    as in an older run. counts [N, classes]: of partition.json, which older runs lack. start: start.json, the same.
    precision, version: what result.json tells of the machine and of fedllm. train: data.train, instead of a task.
    digests: of the training and the validation split, in partition.json, or with `checkpoint` in a checkpoint alone, as
    in an older run. told: more of result.json. answers: of samples.jsonl. measures: more of each round.
    """
    folder.mkdir(parents=True)
    given_recipe = folder / "recipe.yaml"
    data = {"train": train} if train else {"name": task}
    given_recipe.write_text(yaml.safe_dump({"data": data, "algorithm": {"name": algorithm}}))
    wanted = "null" if target is None else f"{{{metric}: {target}}}"
    more = (f"run.seed={seed}", f"eval.target={wanted}", f"federation.rounds={len(scores)}")
    given_recipe.write_text(load_recipe(given_recipe, [*more, *overrides]).for_clients(100).yaml())
    lines = []
    for number, score in enumerate(scores, 1):
        line = {"round": number, "train_loss": 1 / number, "bytes_up": 1000, "bytes_down": 500, "seconds": 2.0,
                "simulated_seconds": simulated, "clients": [0, 1], "rejected": {}}  # fmt: skip
        line |= {name: values[number - 1] for name, values in measures.items()}
        if score is not None:
            line |= {"eval_loss": 1 - score, metric: score, "f1": score / 2, "eval_seconds": 0.1}
        lines.append(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + ('{"round": 99, "train_l' if torn else ""))
    known = {"data": dict(zip(("training", "validation"), digests, strict=True))} if digests else {}
    if checkpoint:
        (folder / "checkpoints" / "000004").mkdir(parents=True)
        (folder / "checkpoints" / "000004" / "manifest.json").write_text(json.dumps({"facts": known}))
    if counts or (digests and not checkpoint):
        share = {"sizes": [sum(row) for row in counts], "classes": list(classes), "counts": [list(r) for r in counts]}
        share |= {} if counts else {"sizes": [4], "counts": None}
        (folder / "partition.json").write_text(json.dumps(share | ({} if checkpoint else known)))
    if start:
        (folder / "start.json").write_text(json.dumps(start))
    if finished:
        scored = [line for line in lines if metric in line]
        best = {name: max(scored, key=lambda line: line[name]) for name in (metric, "f1")}
        best["eval_loss"] = min(scored, key=lambda line: line["eval_loss"])
        hits = [line["round"] for line in scored if target is not None and line[metric] >= target]
        result = {
            "status": "finished", "primary": metric, "algorithm": algorithm, "seed": seed,
            "final": {name: scored[-1][name] for name in best},
            "best": {name: {"value": line[name], "round": line["round"]} for name, line in best.items()},
            "target": None if target is None else {metric: target}, "rounds": len(lines),
            "rounds_to_target": hits[0] if hits else None, "client_memory": {},
            "rejected": sum(len(line["rejected"]) for line in lines),
            "machine": {"precision": precision} if precision else {},
            "versions": {"fedllm": version} if version else {},
            "totals": {name: sum(line[name] for line in lines) for name in COSTS},
        }  # fmt: skip
        for name, cost in (start or {}).items():
            result["totals"][name] += cost
        if memory is not None:
            result |= {"client_memory_bytes": memory, "vectors_per_round": {"sent": 4.0, "derived": 4.0}}
        (folder / "result.json").write_text(json.dumps(result | (told or {})))
    if answers:
        (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
    return folder


def groups_of(*folders: Path):
    runs, problems = read_runs(folders)
    assert not problems
    return group_runs(runs)


def column(groups, heading: str, targets=()) -> list[str]:
    summary = summarise(groups, targets)
    return [row[summary.headings.index(heading)] for row in summary.rows]

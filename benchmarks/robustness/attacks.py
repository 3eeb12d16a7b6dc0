"""Runs each robust rule with bad clients: a fifth of all clients send a lie in the place of their update.

python -m benchmarks.robustness.attacks                                   # the quickstart's articles, three seeds
python -m benchmarks.robustness.attacks --algorithm fadamgc --attacks flip,none --seeds 0
python -m benchmarks.robustness.attacks --rounds 2 --seeds 0 --out /tmp/attacks        # to try it

Each run has a folder OUT/ALGORITHM-ATTACK-RULE-sSEED, as `fedllm run` leaves it. The same command goes on where it was
interrupted and reads what is finished. OUT/attacks.json and the table have the best and the final score of each run.

The attacks, on every vector that a bad client sends: flip is -10 times the vector, nan is not finite, noise is 1,000
times as long as the vector. Of 20 clients 4 are bad, drawn from the seed, and 12 are in a round, so that faulty=4 holds
in every round. A rule that the algorithm cannot have is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from fedllm import load_recipe
from fedllm.aggregation.settings import RobustSettings
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.common.console import console, say
from fedllm.common.seeding import numpy_rng, torch_rng
from fedllm.experiment.build import ReadCache
from fedllm.experiment.run import run
from fedllm.experiment.session import Session
from fedllm.experiment.training import ThisMachine
from fedllm.federation.rounds import Plan, RoundReport, run_round

ATTACKS = ("none", "flip", "nan", "noise")
RULES = {
    "mean": "robust={rule: mean}",
    "norm": "robust={rule: mean, norm: 3}",
    **{
        rule: f"robust={{rule: {rule}, faulty: 4}}"
        for rule in ("median", "trimmed_mean", "nnm_trimmed_mean", "multi_krum")
    },
}
RATES = {"localadamw": 4.0e-3, "fadamgc": 4.0e-3, "fedadamw": 4.0e-3}
SHARE = 0.2  # of all clients that are bad


@dataclass(frozen=True)
class Lies:
    """A step on uploads that replaces what the bad clients send, after all steps of honest clients."""

    attack: str
    bad: frozenset[int]
    seed: int

    def send(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        for row, client in enumerate(uploads.clients):
            if client in self.bad:
                for name, value in uploads.sent.items():
                    value[row] = self._lie(value[row], name, uploads.round, client)

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """A lie is made where it is sent."""

    def _lie(self, value: torch.Tensor, name: str, round: int, client: int) -> torch.Tensor:
        if self.attack == "flip":
            return -10 * value
        if self.attack == "nan":
            return torch.full_like(value, torch.nan)
        noise = torch.randn(len(value), generator=torch_rng(self.seed, f"lie {name}", round, client)).to(value)
        return noise * (1000 * value.norm() / noise.norm())


class LyingMachine(ThisMachine):
    """Rounds of a run in which some clients lie."""

    def __init__(self, attack: str, seed: int) -> None:
        self.attack, self.seed = attack, seed

    def train(self, session: Session, clients: Sequence[int], tracked: Sequence[int], plan: Plan) -> RoundReport:
        setup, number = session.job.setup, session.job.info.num_clients
        drawn = numpy_rng(self.seed, "bad clients").choice(number, round(SHARE * number), replace=False)
        lies = Lies(self.attack, frozenset(drawn.tolist()), self.seed)
        steps = setup.pipeline.steps if self.attack == "none" else (*setup.pipeline.steps, lies)
        lying = replace(setup, pipeline=replace(setup.pipeline, steps=steps))
        return run_round(lying, session.state, clients, tracked, plan)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--algorithm", default="localadamw,fadamgc", help="names with commas between them")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, help="default: the recipe's")
    parser.add_argument("--out", type=Path, default=Path("runs/attacks"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    cache, found = ReadCache(), list[dict[str, Any]]()
    for seed in arguments.seeds.split(","):
        for algorithm in arguments.algorithm.split(","):
            for attack in arguments.attacks.split(","):
                for rule in arguments.rules.split(","):
                    if (line := one(arguments, cache, algorithm, attack, rule, int(seed))) is not None:
                        found.append(line)
                        (arguments.out / "attacks.json").write_text(json.dumps(found, indent=1) + "\n")
    console.print(table(found))
    return 0


def one(
    arguments: argparse.Namespace, cache: ReadCache, algorithm: str, attack: str, rule: str, seed: int
) -> dict[str, Any] | None:
    """The scores of one run; None for a rule that the algorithm cannot have. A run that ends in an error has none."""
    settings = f"algorithm={{name: {algorithm}, lr: {RATES.get(algorithm, 1.0e-3)}, schedule: cosine_rounds}}"
    length = [] if arguments.rounds is None else [f"federation.rounds={arguments.rounds}"]
    keys = [settings, "algorithm.weights=uniform", "federation.clients_per_round=12", f"run.seed={seed}", *length]
    plain = load_recipe(arguments.recipe, [*keys, *arguments.overrides])
    robust = load_robust(RULES[rule])
    if robust.misfit(plain.load_algorithm(), plain.federation.clients_per_round) is not None:
        return None
    folder = arguments.out / f"{algorithm}-{attack}-{rule}-s{seed}"
    recipe = load_recipe(arguments.recipe, [*keys, RULES[rule], *arguments.overrides, f"run.dir={folder}"])
    line: dict[str, Any] = {"algorithm": algorithm, "attack": attack, "rule": rule, "seed": seed}
    try:
        done = run(recipe, cache, source=LyingMachine(attack, seed))
    except Exception as error:  # a run with the mean may diverge: that is its result
        say(f"{folder}: {error}")
        return {**line, "best": None, "final": None, "rejected": None, "error": str(error).splitlines()[0]}
    primary = done.result["primary"]
    best, final = done.result["best"][primary], done.result["final"][primary]
    rejected = sum(len(each["rejected"]) for each in done.metrics)
    return {**line, "best": best and best["value"], "final": final, "rejected": rejected, "error": None}


def load_robust(override: str) -> RobustSettings:
    """The settings that an override of the section `robust` gives."""
    import yaml

    return RobustSettings(**yaml.safe_load(override.partition("=")[2]))


def table(found: list[dict[str, Any]]) -> Table:
    """The final scores: a line for each algorithm and rule, a column for each attack, the mean over seeds."""
    attacks = list(dict.fromkeys(line["attack"] for line in found))
    shown = Table("algorithm", "rule", *attacks, box=None)
    for algorithm, rule in dict.fromkeys((line["algorithm"], line["rule"]) for line in found):
        cells = []
        for attack in attacks:
            wanted = (algorithm, rule, attack)
            lines = [each for each in found if (each["algorithm"], each["rule"], each["attack"]) == wanted]
            scores = [each["final"] for each in lines if each["final"] is not None]
            failed = len(lines) - len(scores)
            mean = f"{sum(scores) / len(scores):.3f}" if scores else "-"
            cells.append(mean + (f" ({failed} failed)" if failed else ""))
        shown.add_row(algorithm, rule, *cells)
    return shown


if __name__ == "__main__":
    raise SystemExit(main())

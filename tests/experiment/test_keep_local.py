"""Heads that stay at the clients: a deployed run has the numbers of the simulation, and each site its own adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters import adapter
from conftest import write_rows
from federations import ThreadLink, deployed, numbers, settings, simulated, split_rows, three_sites
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.experiment.run import RunResult, dry_run, run

OVERRIDES = [
    "partition={scheme: by_column, column: site, clients: 3}", "local={steps: 3, batch_size: 8}", "run.trackers=[]",
    "federation={rounds: 3, clients_per_round: 3, tracked_per_round: 2, min_clients: 2}", "run.device=cpu",
    "data.classes=['0', '1']", "run.stacked_clients=1", "deployment.keep_local=head",
]  # fmt: skip


@pytest.fixture(scope="module")
def three(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites, with validation samples of their own at two of them."""
    folder = three_sites(tiny, tmp_path_factory.mktemp("three"))
    held = split_rows(write_rows(folder / "held.csv", 50, seed=1), "site", folder / "held")
    lines = [path.read_text().splitlines() for path in held[:2]]
    (folder / "validation.csv").write_text("\n".join([lines[0][0], *lines[0][1:], *lines[1][1:]]) + "\n")
    recipe = (folder / "recipe.yaml").read_text()
    recipe = recipe.replace(str(tiny / "validation.csv"), str(folder / "validation.csv"))
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def link_of(three: Path, folder: Path) -> ThreadLink:
    held = [three / "held" / "site0.csv", three / "held" / "site1.csv", None]
    paths = sorted((three / "sites").iterdir())
    return ThreadLink(
        [settings(folder, path, path.stem, validation=own) for path, own in zip(paths, held, strict=True)]
    )


def own_adapters(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The adapters that the sites have written into their folders."""
    found = sorted(folder.glob("site?/*/adapter/adapter_model.safetensors"))
    return [load_file(path) for path in found]


def heads(result: RunResult) -> list[torch.Tensor]:
    """The clients' own values in a simulation's last checkpoint."""
    last = sorted((result.folder / "checkpoints").iterdir())[-1]
    return [load_file(path)["personal"] for path in sorted((last / "clients").iterdir())]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fadamgc", "fedadamw", "scaffold", "localadamw"])
def test_a_deployed_run_with_own_heads_has_the_numbers_of_the_simulation(
    three: Path, tmp_path: Path, algorithm: str
) -> None:
    """One of its sites is started again in round 2, and the upload that it had made is lost with the process."""
    overrides = [*OVERRIDES, f"algorithm.name={algorithm}"]
    link, trained = link_of(three, tmp_path), list[int]()

    def restarted(site: int, kind: str, answer: bytes) -> bytes | None:
        trained.extend([site] if kind == "train" else [])
        if kind == "train" and site == 1 and trained.count(1) == 2:
            link.restart(1)
            return None
        return answer

    link.spoil = restarted
    found = deployed(three / "recipe.yaml", overrides, tmp_path / "deployed", link)
    expected = simulated(three / "recipe.yaml", overrides, tmp_path / "simulated")
    ours, theirs = adapter(found.folder), adapter(expected.folder)
    assert all(float((ours[name] - theirs[name]).abs().max()) <= 1e-6 for name in ours)
    for line, other in zip(numbers(found.metrics), numbers(expected.metrics), strict=True):
        for key in line.keys() - {"v_spread"}:
            near = isinstance(line[key], float)
            assert line[key] == (pytest.approx(other[key], abs=1e-5, rel=1e-5) if near else other[key]), key

    written = own_adapters(tmp_path)
    assert len(written) == 3
    shared = [name for name in ours if "lora_" in name]
    own = [name for name in ours if name not in shared]
    for site, (tensors, head) in enumerate(zip(written, heads(expected), strict=True)):
        assert all(torch.equal(tensors[name], ours[name]) for name in shared)
        values = torch.cat([tensors[name].flatten() for name in sorted(own)])
        assert float((values.sort().values - head.sort().values).abs().max()) <= 1e-6, site
    assert not any(torch.equal(written[0][name], written[1][name]) for name in own)
    start = simulated(three / "recipe.yaml", [*overrides, "federation.rounds=1"], tmp_path / "one")
    assert all(torch.equal(ours[name], adapter(start.folder)[name]) for name in own)  # the server's head never moves


@pytest.mark.slow
def test_an_own_adapter_gives_the_scores_that_its_site_reported(three: Path, tmp_path: Path) -> None:
    """It is read with PEFT alone."""
    found = deployed(three / "recipe.yaml", OVERRIDES, tmp_path / "deployed", link_of(three, tmp_path))
    told = found.metrics[-1]["sites"]
    assert sorted(told) == ["0", "1"]
    for site in ("0", "1"):
        (folder,) = tmp_path.glob(f"site{site}/*/adapter")
        config = AutoConfig.from_pretrained(folder / "base_config.json")
        model = AutoPeftModelForSequenceClassification.from_pretrained(folder, id2label=config.id2label).eval()
        rows = [line.split(",") for line in (three / "held" / f"site{site}.csv").read_text().splitlines()[1:]]
        tokens = AutoTokenizer.from_pretrained(folder)([row[0] for row in rows], padding=True, return_tensors="pt")
        labels = torch.tensor([int(row[1]) for row in rows])
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(**tokens).logits, labels)
        assert told[site]["samples"] == len(rows)
        assert told[site]["eval_loss"] == pytest.approx(float(loss), abs=1e-4)


@pytest.mark.slow
def test_a_simulation_with_own_heads_goes_on_with_the_same_bits(three: Path, tmp_path: Path) -> None:
    whole = simulated(three / "recipe.yaml", OVERRIDES, tmp_path / "whole")
    simulated(three / "recipe.yaml", [*OVERRIDES, "federation.rounds=2"], tmp_path / "half")
    again = simulated(three / "recipe.yaml", OVERRIDES, tmp_path / "half")
    assert all(torch.equal(one, other) for one, other in zip(heads(whole), heads(again), strict=True))
    assert numbers(whole.metrics) == numbers(again.metrics)
    resolved = load_recipe(tmp_path / "half" / "recipe.yaml")
    assert resolved.deployment.keep_local == "head"
    with pytest.raises(UserError, match=r"deployment.keep_local: 'head' there, None here"):
        run(load_recipe(three / "recipe.yaml", [*OVERRIDES[:-1], f"run.dir={tmp_path / 'half'}"]))


def test_the_plan_says_what_stays(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(load_recipe(three / "recipe.yaml", [*OVERRIDES, f"run.dir={tmp_path / 'run'}"]))
    assert "each client keeps its own" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm={name: fedcm}"], "deployment.keep_local: found head, but fedcm cannot leave coordinates out"),
        (["eval.by=site"], "eval.by: found site, but with deployment.keep_local"),
        (["deployment.keep_local=lora"], "keep_local: found 'lora'"),
    ],
)
def test_what_own_heads_do_not_fit_is_refused(three: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dry_run(load_recipe(three / "recipe.yaml", [*OVERRIDES, *overrides, f"run.dir={tmp_path / 'run'}"]))


def test_sites_must_know_the_last_round(three: Path, tmp_path: Path) -> None:
    stopping = ["eval={target: {accuracy: 0.5}, stop_at_target: true}"]
    with pytest.raises(UserError, match=r"eval.stop_at_target: found true, but with deployment.keep_local"):
        deployed(three / "recipe.yaml", [*OVERRIDES, *stopping], tmp_path / "run", ThreadLink([]))

"""Deployed runs: sites of this process make the rounds, with the numbers of the simulation."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from causal_checkpoints import save_causal
from conftest import write_rows
from federations import ThreadLink, deployed, numbers, recipe_of, settings, simulated, split_rows, three_sites, written
from safetensors.torch import load_file
from tiny_images import write_parquet
from tiny_models import WORDS
from transformers import ResNetConfig, ResNetForImageClassification

from fedllm.cli.commands import main
from fedllm.common.errors import UserError
from fedllm.deployment.server import Server
from fedllm.deployment.site_messages import Announcement, Joined, TrainAnswer, TrainOrder, failure
from fedllm.experiment.build import assemble
from fedllm.experiment.parties import ServerOf
from fedllm.experiment.run import RunResult
from fedllm.experiment.serve import deployable, plan_serve
from fedllm.experiment.site import open_site
from fedllm.models.fingerprint import fingerprint
from fedllm.results.reader import load_run


def write_pairs(path: Path, first: int, rows: int) -> None:
    """Prompts about four animals, whose response depends on the animal."""
    pairs = [(("cat", "dog", "mat", "tree")[row % 4], WORDS[(7 * row) % 20], row) for row in range(first, first + rows)]
    lines = [
        {"prompt": f"the {animal} on {word} {row % 7 * 'very '}", "completion": f"{animal} sat", "topic": animal}
        for animal, word, row in pairs
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def image_recipe(folder: Path, norm: str) -> Path:
    """A ResNet with batch norm on images of three sites, each with a file of its own."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ResNetForImageClassification(config).save_pretrained(folder / "resnet")
    table = pq.read_table(write_parquet(folder / "all.parquet", 48, seed=0))
    table = table.append_column("site", pa.array([f"site{row // 3 % 3}" for row in range(48)]))
    pq.write_table(table, folder / "train.parquet")
    (folder / "sites").mkdir()
    for site in ("site0", "site1", "site2"):
        pq.write_table(table.filter(pc.equal(table["site"], site)), folder / "sites" / f"{site}.parquet")
    write_parquet(folder / "validation.parquet", 15, seed=1)
    return written(folder / "recipe.yaml", {
        "model": {"name": str(folder / "resnet"), "norm": norm},
        "lora": None,
        "data": {"task": "image_classification", "train": str(folder / "train.parquet"),
                 "validation": str(folder / "validation.parquet"), "classes": ["blue", "green", "red"]},
        "partition": {"scheme": "by_column", "column": "site", "clients": 3},
        "algorithm": {"name": "scaffold", "lr": 0.05},
        "federation": {"rounds": 3, "clients_per_round": 2},
        "local": {"steps": 3, "batch_size": 8},
        "run": {"precision": "float32", "threads": 1, "trackers": [], "device": "cpu"},
    })  # fmt: skip


OVERRIDES = [
    "partition={scheme: by_column, column: site, clients: 3}", "local={steps: 3, batch_size: 8}", "run.trackers=[]",
    "federation={rounds: 3, clients_per_round: 3, tracked_per_round: 2, min_clients: 2}", "run.device=cpu",
    "data.classes=['0', '1']", "run.stacked_clients=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def three(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_sites(tiny, tmp_path_factory.mktemp("three"))


def link_of(three: Path, folder: Path) -> ThreadLink:
    paths = sorted((three / "sites").iterdir())
    return ThreadLink([settings(folder, path, path.stem) for path in paths])


def require_equal(found: RunResult, expected: RunResult, tolerance: float = 1e-6) -> None:
    """What was trained to `tolerance`, and the lines of metrics.jsonl but for times and v_spread."""
    name = "adapter/adapter_model.safetensors"
    name = name if (found.folder / name).is_file() else "model/model.safetensors"
    ours, theirs = (load_file(each.folder / name) for each in (found, expected))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert float((value - theirs[key]).abs().max()) <= tolerance, key
    for line, other in zip(numbers(found.metrics), numbers(expected.metrics), strict=True):
        other.pop("v_spread", None)
        assert line.keys() == other.keys()
        for key, value in line.items():
            near = isinstance(value, float)
            assert value == (pytest.approx(other[key], abs=1e-5, rel=1e-5) if near else other[key]), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "train"),
    [
        ("fadamgc", "AB"),
        ("fedadamw", "AB"),
        ("scaffold", "AB"),
        ("localadamw", "AB"),
        ("moon", "AB"),
        ("fadamgc", "turns"),
    ],
)
def test_a_deployed_run_has_the_numbers_of_the_simulation(
    three: Path, tmp_path: Path, algorithm: str, train: str
) -> None:
    """One of its sites is started again in round 2."""
    overrides = [*OVERRIDES, f"algorithm.name={algorithm}", f"lora.train={train}"]
    link = link_of(three, tmp_path)
    trained: list[int] = []

    def restarted(site: int, kind: str, answer: bytes) -> bytes | None:
        trained.extend([site] if kind == "train" else [])
        if kind == "train" and site == 1 and trained.count(1) == 2:
            link.restart(1)
            return None  # its upload is lost with the process
        return answer

    link.spoil = restarted
    found = deployed(three / "recipe.yaml", overrides, tmp_path / "deployed", link)
    assert trained.count(1) == 4
    require_equal(found, simulated(three / "recipe.yaml", overrides, tmp_path / "simulated"))
    assert [line["missing"] for line in found.metrics] == [[], [], []]
    assert load_run(found.folder).finished


@pytest.mark.slow
def test_a_server_that_was_started_again_goes_on(three: Path, tmp_path: Path) -> None:
    """It ends in round 2, when one upload has arrived and one site has trained; all sites are asked again."""
    link, trained = link_of(three, tmp_path), list[int]()

    def ended(site: int, kind: str, answer: bytes) -> bytes | None:
        trained.extend([site] if kind == "train" else [])
        if len(trained) == 5:
            raise_in_server.set()
        return None if raise_in_server.is_set() else answer

    raise_in_server = threading.Event()
    link.spoil = ended
    online = link.online

    def lives() -> dict[int, str]:
        if raise_in_server.is_set():
            raise KeyboardInterrupt
        return online()

    link.online = lives  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        deployed(three / "recipe.yaml", OVERRIDES, tmp_path / "deployed", link)
    found = deployed(three / "recipe.yaml", OVERRIDES, tmp_path / "deployed", link_of(three, tmp_path))
    require_equal(found, simulated(three / "recipe.yaml", OVERRIDES, tmp_path / "simulated"))


@pytest.mark.slow
def test_all_weights_are_trained_at_sites(three: Path, tmp_path: Path) -> None:
    overrides = [
        *OVERRIDES,
        "lora=null",
        "algorithm={name: localadamw, lr: 0.001}",
        "federation.tracked_per_round=null",
    ]
    found = deployed(three / "recipe.yaml", overrides, tmp_path / "deployed", link_of(three, tmp_path))
    require_equal(found, simulated(three / "recipe.yaml", overrides, tmp_path / "simulated"))


@pytest.mark.slow
def test_robust_rules_and_short_downloads_at_sites(three: Path, tmp_path: Path) -> None:
    """With lora_gap, which the server measures from the uploads."""
    algorithm = ["algorithm={name: localadamw, lr: 0.001}", "federation.tracked_per_round=null"]
    overrides = [*OVERRIDES, *algorithm, "robust={rule: median, faulty: 1, norm: 50}", "downloads.bits=bfloat16"]
    found = deployed(three / "recipe.yaml", overrides, tmp_path / "deployed", link_of(three, tmp_path))
    require_equal(found, simulated(three / "recipe.yaml", overrides, tmp_path / "simulated"))
    assert all(line["lora_gap"] > 0 for line in found.metrics if "eval_loss" in line)
    values = found.result["trainable_parameters"]
    assert all(line["bytes_down"] == 3 * 2 * values for line in found.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_language_models_are_trained_at_sites(tmp_path: Path, weights: str) -> None:
    save_causal(tmp_path / "llama", "llama")
    for name, first, rows in (("train", 0, 48), ("validation", 48, 12)):
        write_pairs(tmp_path / f"{name}.jsonl", first, rows)
    paths = split_rows(tmp_path / "train.jsonl", "topic", tmp_path / "sites")
    recipe = written(tmp_path / "recipe.yaml", {
        "model": {"name": str(tmp_path / "llama"), "dropout": 0.0},
        "lora": {"rank": 4, "alpha": 8, "targets": ["query", "value"]},
        "data": {"task": "causal_lm", "train": str(tmp_path / "train.jsonl"),
                 "validation": str(tmp_path / "validation.jsonl"), "max_length": 40},
        "partition": {"scheme": "by_column", "column": "topic", "clients": 4},
        "algorithm": {"name": "fadamgc", "lr": 2e-2, "weights": weights},
        "federation": {"rounds": 3, "clients_per_round": 3, "tracked_per_round": 2},
        "local": {"steps": 3, "batch_size": 4},
        "run": {"precision": "float32", "threads": 1, "stacked_clients": 1, "trackers": [], "device": "cpu"},
    })  # fmt: skip
    link = ThreadLink([settings(tmp_path, path, path.stem) for path in paths])
    found = deployed(recipe, ["deployment.sites=4"], tmp_path / "deployed", link)
    require_equal(found, simulated(recipe, [], tmp_path / "simulated"))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["average", "local"])
def test_images_and_batch_norm_at_sites(tmp_path: Path, norm: str) -> None:
    recipe = image_recipe(tmp_path, norm)
    paths = sorted((tmp_path / "sites").glob("*.parquet"))
    link = ThreadLink([settings(tmp_path, path, path.stem) for path in paths])
    found = deployed(recipe, [], tmp_path / "deployed", link)
    require_equal(found, simulated(recipe, [], tmp_path / "simulated"))


@pytest.mark.slow
def test_sites_evaluate_where_the_server_has_no_samples(three: Path, tmp_path: Path) -> None:
    """Two of three sites have validation samples. The scores are the weighted means of theirs."""
    found_at = sorted((three / "sites").iterdir())
    held = [write_rows(tmp_path / f"held{site}.csv", 10 * (site + 1), seed=site) for site in range(2)]
    given = [
        settings(tmp_path, path, path.stem, validation=own) for path, own in zip(found_at, [*held, None], strict=True)
    ]
    overrides = [*OVERRIDES, "data.train=null", "data.validation=null"]
    found = deployed(three / "recipe.yaml", overrides, tmp_path / "run", ThreadLink(given))
    for line in found.metrics:
        own = line["sites"]
        assert {site: each["samples"] for site, each in own.items()} == {"0": 10, "1": 20}
        mean = (own["0"]["accuracy"] + 2 * own["1"]["accuracy"]) / 3
        assert line["accuracy"] == pytest.approx(mean)
    assert found.result["final"]["accuracy"] == found.metrics[-1]["accuracy"]
    assert main(["report", str(found.folder), "--out", str(tmp_path / "report.html")]) == 0
    sizes = json.loads((found.folder / "partition.json").read_text())
    assert (sizes["sizes"], sizes["names"]) == ([12, 12, 12], ["site0", "site1", "site2"])


def test_an_order_asked_twice_is_answered_with_the_same_bytes(three: Path, tmp_path: Path) -> None:
    """Also by a process that was started again, and a state that was lost is named."""
    path = sorted((three / "sites").iterdir())[0]
    worker = open_site(settings(tmp_path, path, "site0"))
    recipe = deployable(recipe_of(three / "recipe.yaml", OVERRIDES, tmp_path / "run"))
    job = assemble(recipe, party=ServerOf(3))
    sections = {name: keys or None for name, keys in job.recipe.sections().items()}
    told = Announcement("a" * 32, 0, 3, sections, job.task.classes, version("fedllm")).to_bytes()
    server = Server(job.algorithm, job.problem.initial(), replace(job.info, model=fingerprint(job.model)))
    order = TrainOrder("a" * 32, server.broadcast(0), True).to_bytes()
    assert failure(worker.handle("train", order)).again
    assert Joined.from_bytes(worker.handle("announce", told)).samples == 12
    first = worker.handle("train", order)
    assert worker.handle("train", order) == first
    again = open_site(settings(tmp_path, path, "site0"))
    again.handle("announce", told)
    assert again.handle("train", order) == first
    assert server.add(TrainAnswer.from_bytes(first).upload, client=0) is None
    server.aggregate()
    (tmp_path / "site0" / ("a" * 32) / "ledger.safetensors").unlink()
    lost = open_site(settings(tmp_path, path, "site0"))
    lost.handle("announce", told)
    said = failure(lost.handle("train", TrainOrder("a" * 32, server.broadcast(0), True).to_bytes()))
    assert "the last upload of this client that counted is" in said.error
    assert failure(lost.handle("train", b"garbage")).whose == "server"
    assert failure(lost.handle("dance", b"")).whose == "server"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["local={epochs: 1, steps: null}"], "local.steps: missing"),
        (["deployment.sites=null", "partition={scheme: iid}"], "deployment.sites: missing"),
        (["data.max_train=5"], "data.max_train: found 5"),
        (["deployment.start=4"], "start: found 4, expected at most"),
        (["algorithm.tracking_init=gradient"], "tracking_init"),
    ],
)
def test_what_sites_cannot_do_is_refused(tiny: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        deployable(recipe_of(tiny / "recipe.yaml", [*OVERRIDES, *overrides], tmp_path))


def test_the_plan_says_when_a_round_goes_on(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_serve(recipe_of(three / "recipe.yaml", OVERRIDES, tmp_path / "run"))
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "3; round 1 begins when 3 have joined",
        "missing sites after 60 s, if 2 or more",
        "is asked again after",
    ):
        assert words in said
    assert "samples per client" not in said

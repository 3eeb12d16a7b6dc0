"""The section `uploads:` in whole runs: fewer bytes, resumed runs, several processes, and what earlier runs did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from adapters import same_bits

from fedllm import load_recipe, run_recipe
from fedllm.common.errors import UserError
from fedllm.results.reader import load_run

GC = "algorithm={name: fadamgc, lr: 5.0e-3}"


@pytest.mark.slow
def test_a_run_sends_less_and_resumes(tiny: Path, tmp_path: Path) -> None:
    overrides = [GC, "uploads={bits: int8, clip: 1.0}", "run.checkpoint_every=2"]
    plain = run_recipe(tiny / "recipe.yaml", [GC], tmp_path / "plain")
    small = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "small")
    sent = [sum(line["bytes_up"] for line in done.metrics) for done in (plain, small)]
    assert sent[1] < 0.27 * sent[0]
    assert not same_bits(plain.folder, small.folder)
    cut = Path(shutil.copytree(small.folder, tmp_path / "cut"))
    (cut / "result.json").unlink()
    shutil.rmtree(cut / "adapter")
    shutil.rmtree(cut / "checkpoints/000004")
    run_recipe(tiny / "recipe.yaml", overrides, cut)
    assert same_bits(small.folder, cut)


def test_a_run_of_an_earlier_version_sent_plain_vectors(tiny: Path, tmp_path: Path) -> None:
    done = run_recipe(tiny / "recipe.yaml", ["federation.rounds=1"], tmp_path / "run")
    path = done.folder / "recipe.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("uploads:")))
    assert load_run(done.folder).recipe["uploads"] == {"clip": None, "bits": "float32"}
    again = run_recipe(tiny / "recipe.yaml", ["federation.rounds=1"], done.folder)
    assert again.result == json.loads((done.folder / "result.json").read_text())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("uploads.clip={y: 1.0}", "uploads.clip: found a norm for 'y', expected one for d, which LocalAdam sends"),
        ("uploads.clip=0", "clip: found 0.*, expected a number above 0"),
        ("uploads.bits=int2", "uploads.bits"),
        ("lora.train=A", "lora.train"),
        ("robust={rule: median}", "robust.faulty: missing, but rule=median needs it"),
        ("robust.faulty=2", "robust.faulty: found 2 with rule=mean"),
        ("robust={rule: krum, faulty: 1}", "robust.rule: found 'krum', expected one of: mean, median"),
        ("robust={rule: multi_krum, faulty: 5}", "clients_per_round: found .*, but robust.rule=multi_krum"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(tiny: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(tiny / "recipe.yaml", ["algorithm=localadam", override])

"""The benchmarks of what happens to uploads, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.robustness import attacks
from benchmarks.uploads import speed


@pytest.mark.slow
def test_the_costs_of_a_round(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [str(tiny / "recipe.yaml"), "--repeats", "1", "--faulty", "1", "--out", str(tmp_path / "speed.json")]
    monkeypatch.setattr("sys.argv", ["speed", *words, "federation.tracked_per_round=5"])
    assert speed.main() == 0
    sides = json.loads((tmp_path / "speed.json").read_text())["sides"]
    assert {"as it is", "lora_gap", "uploads.bits=int8", "robust.rule=multi_krum"} <= set(sides)
    assert all(side["cpu_seconds"] > 0 and 0 < side["outside"] < side["seconds"] for side in sides.values())
    assert sides["as it is"]["adds"] == 0


@pytest.mark.slow
def test_attacks_are_made_and_resisted(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad clients are rejected by name; the same command reads what is finished."""
    chosen = ["--algorithm", "localadamw,fadamgc", "--attacks", "none,flip,nan", "--rules", "mean,median,multi_krum"]
    words = ["--recipe", str(tiny / "recipe.yaml"), *chosen, "--rounds", "1", "--seeds", "0", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["attacks", *words, "partition.clients=20", "federation.tracked_per_round=null"])
    assert attacks.main() == 0
    found = json.loads((tmp_path / "attacks.json").read_text())
    lines = {(each["algorithm"], each["attack"], each["rule"]): each for each in found}
    assert len(lines) == 3 * 3 + 3 * 2, "fadamgc has no median"
    bad = lines["localadamw", "nan", "mean"]["rejected"]
    assert bad >= 1
    assert lines["localadamw", "none", "mean"]["rejected"] == 0
    assert lines["fadamgc", "flip", "multi_krum"]["rejected"] == 4
    assert all(each["error"] is None for each in found)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    assert attacks.main() == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")} == before

"""The terminal and docs/reference/algorithms.md show what the classes say."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from fedllm.algorithms import algorithm_names
from fedllm.cli.algorithm_docs import describe, markdown, table
from fedllm.cli.algorithm_entries import Scale, entry
from fedllm.common.errors import UserError

SCALE = Scale(dim=1000, num_blocks=10, sampled=4, tracked=2)


def printed(renderable: RenderableType, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_every_algorithm_has_a_row_and_a_section() -> None:
    rows = printed(table())
    for name in algorithm_names():
        assert f" {name} " in rows
        assert f"\n## {name}\n" in markdown()
        for setting in entry(name).own:
            assert setting.meaning in markdown()


@pytest.mark.parametrize(
    ("name", "client", "server", "down", "up"),
    [
        ("fedavg", [], [], "x", "d"),
        ("fedadam", [], ["m", "v"], "x", "d"),
        ("fadamgc", ["y", "v", "vhat"], ["y"], "x y", "d | y"),
        ("fedadamw", [], ["Delta", "vbar"], "x Delta vbar", "d vbar"),
        ("fedlada", [], ["v", "ga"], "x v ga", "d vhat"),
        ("fadamgc_b", ["y"], ["y", "vbar"], "x y vbar", "d vbar | y"),
    ],
)
def test_footprints(name: str, client: list, server: list, down: str, up: str) -> None:
    found = entry(name).footprint
    everybody, _, tracked = up.partition(" | ")
    assert (list(found.client), list(found.server)) == (client, server)
    assert (list(found.down), list(found.up), list(found.tracked_up)) == (
        down.split(), everybody.split(), tracked.split()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "down", "up"),
    [
        ("fedavg", 1000, 4 * 1000),
        ("fadamgc", 2000, 4 * 1000 + 2 * 1000),
        ("fedadamw", 2010, 4 * 1010),
        ("fadamgc_b", 2010, 4 * 1010 + 2 * 1000),
        ("fedlada", 3000, 4 * 2000),
    ],
)
def test_bytes_of_a_round(name: str, down: int, up: int) -> None:
    sent = entry(name).footprint.traffic(SCALE)
    assert (sent.bytes_down, sent.bytes_up) == (4 * 4 * down, 4 * up)


@pytest.mark.parametrize("name", ["fadamgc", "fa_nt", "scaffold"])
def test_tracking_costs_three_vectors_and_the_tracked_share(name: str) -> None:
    """3 + T/S, as GC's Table 7 over its Table 2 gives: 3.5 at T = S/2."""
    footprint = entry(name).footprint
    assert footprint.cells()[2:4] == ["2 d", "d + T/S d"]
    sent = footprint.traffic(SCALE)
    assert (sent.bytes_down + sent.bytes_up) / (4 * SCALE.dim * SCALE.sampled) == 3 + SCALE.tracked / SCALE.sampled
    assert "3 + T/S" in markdown()
    assert "2 + 2 T/S" not in markdown()


def test_departures_from_the_papers_are_marked() -> None:
    """Each with the words of its reason, in the section of its algorithm or before all of them."""
    sections = markdown().split("\n## ")[1:]
    text = {section.partition("\n")[0]: " ".join(section.split()) for section in sections}
    marked = {
        "fadamgc": ["eps is added to the root", "clients keep v_i and vhat_i", "y_i starts at 0"],
        "fa_nt": ["eps is added to the root", "clients keep v_i and vhat_i", "K eta is the sum of the rates"],
        "localadam": ["eps is added to the root", "v_i and vhat_i persist"],
        "localadamw": ["the weights decay", "K in t' is the most steps"],
        "fedadamw": [
            "the weights decay",
            "the second moment, which is carried over",
            "K in t' is the most steps",
            "the partition of App. D, Alg. 3",
        ],
        "fedadam": ["no bias correction", "v starts at 0"],
        "fedams": ["the floor holds under both options"],
        "fedlada": ["beta2 is 0.99"],
        "fedavgm": ["eta_g multiplies D"],
        "scaffold": ["K eta in c_i' is the sum of the rates"],
        "padamfed": ["K in the default formulas"],
        "Choices": ["dropout of attention probabilities is off", "LoRA's matrices, biases and fused layers"],
    }
    for name, choices in marked.items():
        for choice in choices:
            after_marks = text[name].split("*choice*")[1:]
            assert any(choice in part for part in after_marks), f"{name}: {choice}"


def test_variants_are_the_settings_that_change_what_is_sent_or_kept() -> None:
    variants = {name: set(entry(name).variants) for name in algorithm_names() if entry(name).variants}
    assert variants == {
        "fa_nt": {"form: one_vector"},
        "localadam": {"second_moment: reset", "amsgrad: false"},
        "localadamw": {f"aggregate: {name}" for name in ("m", "v", "vm", "mean_v")},
        "fadamgc": {"local: rmsprop"},
        "fedadamw": {"aggregate_v: false"},
    }
    assert entry("localadamw").variants["aggregate: vm"].up_text() == "3 d"


def test_describe_prints_equations_settings_and_traffic() -> None:
    text = printed(describe("fadamgt", SCALE))
    for expected in (
        "        gh = g + y - y_i\n",
        "y_i' = (1/K) sum_k g",
        "fadamgt, fedit_adamgt",
        "b1, b2   [0.9, 0.99]",
        "2 d    d + T/S d",
        "local: rmsprop",
        "32 kB down and 24 kB up",
    ):
        assert expected in "\n".join(line.rstrip() for line in text.splitlines()) + "\n", expected
    assert "work out Delta" in printed(describe("fedadamw"))
    assert "null" in printed(describe("padamfed"))


def test_an_unknown_name_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"name: unknown algorithm 'fedavgg' \(did you mean 'fedavg'\?\)"):
        describe("fedavgg")

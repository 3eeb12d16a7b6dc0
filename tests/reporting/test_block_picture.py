"""The picture of a partition shows every weight once, cut as its blocks are."""

from __future__ import annotations

from pathlib import Path

import pytest
from block_models import adapt, build
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES
from torch import nn
from transformers import AutoModel, GPTNeoXConfig

from fedllm.blocks import partition
from fedllm.cli.commands import main
from fedllm.reporting.block_picture import Card, _caption, _stripes, cards, draw_blocks


def titled(model: nn.Module) -> dict[str, Card]:
    return {card.title: card for card in cards(model, partition(model))}


def drawn(card: Card) -> dict[str, int]:
    """How many stripes of each tone family a card has: heads, ones, whole, faded."""
    found: dict[str, int] = {}
    for _, _, colour, alpha in _stripes(card.tile):
        kind = "faded" if alpha < 1 else "head" if colour in ("#0072B2", "#8FC1E3") else "one"
        found[kind] = found.get(kind, 0) + 1
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_on_a_card_and_its_stripes_cover_it(family: str) -> None:
    model = build(family)
    blocks = partition(model)
    shown = cards(model, blocks)
    assert sum(card.count for card in shown) == len(blocks.tiles)
    for card in shown:
        stripes = list(_stripes(card.tile))
        assert sum(length for _, length, _, _ in stripes) == pytest.approx(1)
        assert [start for start, *_ in stripes] == pytest.approx(
            [sum(length for _, length, _, _ in stripes[:i]) for i in range(len(stripes))]
        )
    assert draw_blocks(shown, family, blocks).get_suptitle().startswith(f"{family}: {blocks.num_blocks:,}")


def test_heads_of_grouped_query_and_fused_attention() -> None:
    llama = titled(build("llama"))
    assert drawn(llama["model.layers.*.self_attn.q_proj.weight"]) == {"head": 4}
    assert drawn(llama["model.layers.*.self_attn.k_proj.weight"]) == {"head": 2}
    assert drawn(llama["model.layers.*.self_attn.v_proj.weight"]) == {"one": 16}
    assert drawn(llama["model.layers.*.mlp.gate_proj.weight"]) == {"one": 16, "faded": 1}
    gpt2 = titled(build("gpt2"))
    assert drawn(gpt2["transformer.h.*.attn.c_attn.weight"]) == {"head": 8, "one": 32}
    assert gpt2["transformer.h.*.attn.c_attn.weight"].count == 2


def test_attention_fused_head_by_head_alternates_and_is_counted_once() -> None:
    config = GPTNeoXConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    card = titled(AutoModel.from_config(config))["layers.*.attention.query_key_value.weight"]
    tones = [colour for _, _, colour, _ in _stripes(card.tile) if colour in ("#0072B2", "#8FC1E3")]
    assert tones == ["#0072B2", "#8FC1E3"] * 4
    assert _caption(card).startswith("96 x 32: 4 query heads\n4 key heads\n32 value rows\n")


def test_low_rank_factors() -> None:
    shown = titled(adapt(build("bert"), "query", "value"))
    layer = "bert.encoder.layer.*.attention.self"
    assert drawn(shown[f"{layer}.query.lora_B"]) == {"head": 4}
    assert shown[f"{layer}.query.lora_B"].shape == (32, 2)
    assert drawn(shown[f"{layer}.value.lora_A"]) == {"one": 2}
    assert shown["classifier.weight"].shape == (2, 32)


def test_other_schemes_are_drawn_too() -> None:
    model = get_peft_model(build("roberta"), LoraConfig(r=2, target_modules=["query"]))
    for scheme in ("tensor", "elementwise", "none"):
        blocks = partition(model, scheme=scheme)
        assert sum(card.count for card in cards(model, blocks)) == len(blocks.tiles)
        draw_blocks(cards(model, blocks), scheme, blocks)


@pytest.mark.slow
def test_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix, options in ((".png", ["--full"]), (".svg", ["--rank", "2"])):
        picture = tmp_path / f"blocks{suffix}"
        assert main(["blocks", str(tiny / "bert"), *options, "--draw", str(picture)]) == 0
        assert picture.stat().st_size > 1000
    capsys.readouterr()
    for path, said in ((tmp_path / "b.doc", "suffix '.doc'"), (tmp_path / "no" / "b.png", "no such folder")):
        assert main(["blocks", str(tiny / "bert"), "--draw", str(path)]) == 2
        assert said in capsys.readouterr().err

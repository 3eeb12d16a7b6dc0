"""`fedllm blocks` on any model folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers as tf

from fedllm.cli.commands import main

LAYER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS = {
    "vit": tf.ViTConfig(**LAYER, image_size=8, patch_size=4),
    "resnet": tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    "t5": tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=32),
    "mixtral": tf.MixtralConfig(**LAYER, vocab_size=32, num_key_value_heads=2, num_local_experts=2),
    "ctrl": tf.CTRLConfig(vocab_size=32, n_embd=32, dff=48, n_layer=1, n_head=4),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models that have a config, but neither weights nor a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        config.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("options", [[], ["--full"], ["--random", "--rank", "2"]])
@pytest.mark.parametrize("name", ["vit", "resnet", "t5", "mixtral"])
def test_a_config_is_enough(name: str, options: list[str], folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", str(folders / name), *options]) == 0
    said = capsys.readouterr().out
    assert "total" in said
    assert ("LoRA on query and value is not possible" in said) == (name == "resnet" and "--full" not in options)


@pytest.mark.parametrize("name", ["vit", "resnet", "mixtral"])
@pytest.mark.slow
def test_filters_tokens_and_experts_are_drawn(name: str, folders: Path, tmp_path: Path) -> None:
    picture = tmp_path / "blocks.svg"
    assert main(["blocks", str(folders / name), "--full", "--draw", str(picture)]) == 0
    text = picture.read_text()
    assert {"vit": "filters", "resnet": "filters", "mixtral": "expert rows"}[name] in text


def test_an_unknown_attention_is_an_error_or_one_block_a_weight(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["blocks", str(folders / "ctrl"), "--full"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "no known attention layout was found" in said
    assert said.rstrip().endswith("pass --unknown tensor to give every weight without a role one block")
    assert "unknown='tensor'" not in said
    assert main([*command, "--unknown", "tensor"]) == 0
    assert "unknown" in capsys.readouterr().out


def test_a_rank_that_does_not_fit_names_the_option(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", str(folders / "vit"), "--rank", "33"]) == 2
    assert "--rank: found 33, expected 1 to 32" in capsys.readouterr().err


def test_the_roles_that_get_an_adapter(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: A by row, B of query and key by head, B of all others by row."""
    assert main(["blocks", str(folders / "vit"), "--rank", "2", "--targets", "all-linear"]) == 0
    *_, total = capsys.readouterr().out.strip().splitlines()
    assert int(total.split()[3]) == 2 * (2 + 4) + 2 * (2 + 32) + (2 + 48) + (2 + 32)
    assert main(["blocks", str(folders / "vit"), "--rank", "2", "--targets", "mlp_in,query"]) == 0
    *_, total = capsys.readouterr().out.strip().splitlines()
    assert int(total.split()[3]) == (2 + 48) + (2 + 4)


@pytest.mark.parametrize(
    ("name", "roles", "said"),
    [
        ("vit", "quary", "--targets: found unknown quary, expected some of: query, key"),
        ("vit", "mlp_gate,query", "lora.targets: found mlp_gate, but model"),
        ("mixtral", "all-linear", "layers.0.mlp.experts (MixtralExperts) has the weights of its experts in one tensor"),
    ],
)
def test_roles_that_cannot_be_had(
    name: str, roles: str, said: str, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["blocks", str(folders / name), "--targets", roles]) == 2
    assert said in capsys.readouterr().err

"""GGUF adapters hold the same change of each weight as the PEFT adapter, in the order of the base's GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from causal_checkpoints import FAMILIES, save_causal
from peft import PeftModel

pytest.importorskip("gguf")
import gguf
from tiny_gguf import save_gguf
from transformers import AutoModelForCausalLM, GgufConfig

from fedllm.common.errors import UserError
from fedllm.models.gguf_adapter import ARCHITECTURES, save_gguf_adapter
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora, trainable_names
from fedllm.models.merged_files import merge
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.tasks.heads import language_head, sequence_head

LLAMA = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
# The layers of all eight, by their names in GGUF files.
NAMES = {
    **dict.fromkeys(FAMILIES, LLAMA),
    "phi3": {
        "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    "gpt2": {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
}  # fmt: skip


def trained(name: str, targets: list[str], scaling: Any = "standard", **model: Any) -> PeftModel:
    """A model all of whose trainable values are random."""
    head = model.pop("head", language_head())
    lora = LoraSettings(rank=2, alpha=6.0, targets=targets, scaling=scaling, dora=model.pop("dora", False))
    adapted = attach_lora(load_backbone(ModelSettings(name=name, **model), head), lora)
    rng = torch.Generator().manual_seed(1)
    for path in trainable_names(adapted):
        value = adapted.get_parameter(path)
        value.data.copy_(torch.randn(value.shape, generator=rng) * 0.3)
    return adapted


def changes(file: Path) -> dict[str, np.ndarray]:
    """What llama.cpp adds to each weight: (alpha / rank) B A, the rank being that of the tensors."""
    reader = gguf.GGUFReader(file)
    alpha = float(reader.get_field("adapter.lora.alpha").contents())
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    weights = {name.rpartition(".")[0] for name in tensors}
    assert set(tensors) == {f"{weight}.lora_{side}" for weight in weights for side in "ab"}
    return {
        weight: alpha / len(tensors[f"{weight}.lora_a"]) * tensors[f"{weight}.lora_b"] @ tensors[f"{weight}.lora_a"]
        for weight in weights
    }


def as_in_gguf(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permutation of a query's or key's rows, written row by row: row 2 i + j of a head is its row
    i + j d / 2."""
    size = len(weight) // heads
    order = [head * size + i + j * size // 2 for head in range(heads) for i in range(size // 2) for j in (0, 1)]
    return weight[order]


@pytest.mark.parametrize("targets", [["all-linear"], ["query", "value", "output"]], ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_change_of_every_weight_is_that_of_the_merged_model(
    tmp_path: Path, family: str, targets: list[str]
) -> None:
    targets = ["query", "key", "value"] if family == "phi3" and "query" in targets else targets
    name = save_causal(tmp_path / family, family, tie_word_embeddings=False)
    model = trained(name, targets)
    file = save_gguf_adapter(model, tmp_path / "adapter.gguf", "mine")
    reader = gguf.GGUFReader(file)
    said = {key: reader.get_field(key).contents() for key in ("general.architecture", "general.type", "adapter.type")}
    assert said == {
        "general.architecture": ARCHITECTURES[family], "general.type": "adapter", "adapter.type": "lora"
    }  # fmt: skip
    found = changes(file)
    before = AutoModelForCausalLM.from_pretrained(name).state_dict()
    after = merge(model).state_dict()
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    expected = {}
    for key in changed:
        layer = key.removesuffix(".weight")
        number = next(part for part in layer.split(".") if part.isdigit())
        known = next(there for here, there in NAMES[family].items() if layer.endswith(f".{here}"))
        change = (after[key] - before[key]).numpy()
        change = change.T if family == "gpt2" else change
        if family in ("llama", "mistral") and known in ("attn_q", "attn_k"):
            change = as_in_gguf(change, {"attn_q": 4, "attn_k": 2}[known])
        expected[f"blk.{number}.{known}.weight"] = change
    assert found.keys() == expected.keys()
    for weight, change in expected.items():
        np.testing.assert_allclose(found[weight], change, atol=1e-5)


@pytest.mark.parametrize("targets", [["query", "value"], ["query", "value", "output"]], ids="-".join)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rslora_adds_as_much_as_lora_with_its_scale(tmp_path: Path, family: str, targets: list[str]) -> None:
    name = save_causal(tmp_path / family, family)
    files = [
        save_gguf_adapter(trained(name, targets, scaling), tmp_path / f"{scaling}.gguf", "mine")
        for scaling in ("standard", "rslora")
    ]
    standard, stabilised = map(changes, files)
    assert standard.keys() == stabilised.keys()
    for weight, change in standard.items():
        np.testing.assert_allclose(stabilised[weight], 2**0.5 * change, rtol=1e-5, atol=1e-7)


def test_dora_is_refused(tmp_path: Path) -> None:
    model = trained(save_causal(tmp_path / "llama", "llama"), ["query"], dora=True)
    with pytest.raises(UserError, match=r"--gguf: the adapter is DoRA's, which llama.cpp cannot apply"):
        save_gguf_adapter(model, tmp_path / "adapter.gguf", "mine")
    assert not (tmp_path / "adapter.gguf").exists()


def test_it_fits_the_weights_of_the_base_that_is_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes are added to the base's own tensors, as llama.cpp does, and transformers reads the sum back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = save_gguf(tmp_path / "base.gguf")
    model = trained(str(base), ["query", "key", "mlp"])
    found = changes(save_gguf_adapter(model, tmp_path / "adapter.gguf", "mine"))
    summed = _with_changes(base, found, tmp_path / "sum.gguf")
    ids = torch.tensor([[1, 40, 50, 60, 70, 2]])
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        options = {"gguf_file": summed.name, "quantization_config": GgufConfig(dequantize=True)}
        read = AutoModelForCausalLM.from_pretrained(tmp_path, **options)(input_ids=ids).logits
        plain = model.get_base_model()
        with model.disable_adapter():
            before = plain(input_ids=ids).logits
    torch.testing.assert_close(read, wanted, atol=1e-3, rtol=1e-3)
    assert (wanted - before).abs().max() > 0.5


def _with_changes(base: Path, found: dict[str, np.ndarray], path: Path) -> Path:
    reader = gguf.GGUFReader(base)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, (values + found.get(tensor.name, 0)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_models_that_have_none(tmp_path: Path) -> None:
    name = save_causal(tmp_path / "llama", "llama")
    with pytest.raises(UserError, match="trained no causal language model"):
        save_gguf_adapter(trained(name, ["query"], head=sequence_head(2)), tmp_path / "a.gguf", "mine")
    model = trained(name, ["query"])
    with pytest.raises(UserError, match=r"expected the name of a file that ends in \.gguf"):
        save_gguf_adapter(model, tmp_path / "adapter", "mine")
    model.config.model_type = "olmo"
    with pytest.raises(UserError, match="the base is of type olmo, expected one of llama, mistral"):
        save_gguf_adapter(model, tmp_path / "a.gguf", "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]

"""Adapters as standard PEFT folders: plain PEFT reads them to the same logits, and they come back bit for bit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, local_hub, save_tiny, tiny_batch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from fedllm.common.errors import UserError
from fedllm.models.adapter_files import load_adapter, save_adapter
from fedllm.models.loading import Backbone, load_backbone
from fedllm.models.lora import attach_lora, trainable_names
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.tasks.heads import sequence_head

ROLES = [
    ["query", "value"], ["query", "key", "value"], ["value"], ["query", "value", "output"], ["output"],
    ["mlp"], ["query", "value", "mlp_out"], ["all-linear"],
]  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Family -> folder of its tiny checkpoint."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: save_tiny(root / family, family) for family in FAMILIES}


def load(name: str, **model: Any) -> Backbone:
    head = sequence_head(3, label_names=["no", "yes", "perhaps"])
    return load_backbone(ModelSettings(name=name, **model), head)


def trained(name: str, lora: LoraSettings | None = None, seed: int = 1) -> PeftModel:
    """A model all of whose trainable values are random."""
    model = attach_lora(load(name), lora or LoraSettings(rank=2, alpha=6.0))
    rng = torch.Generator().manual_seed(seed)
    for parameter in trainable(model).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)
    return model


def trainable(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    return {name: model.get_parameter(name) for name in trainable_names(model)}


def values(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainable(model).items()}


def plain_peft(name: str, folder: Path) -> PeftModel:
    """The adapter as anyone loads it, with transformers and peft alone."""
    base = AutoModelForSequenceClassification.from_pretrained(name, num_labels=3)
    base.config.pad_token_id = AutoTokenizer.from_pretrained(folder).pad_token_id
    return PeftModel.from_pretrained(base, folder)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny_batch(model.config.pad_token_id)).logits


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def change(folder: Path, **changes: Any) -> None:
    """Edit an adapter's config."""
    (folder / "adapter_config.json").write_text(json.dumps(config_of(folder) | changes))


@pytest.mark.parametrize("roles", ROLES, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_gives_the_same_logits(tiny: dict[str, str], tmp_path: Path, family: str, roles: list[str]) -> None:
    model = trained(tiny[family], LoraSettings(rank=2, alpha=6.0, targets=roles))
    tokenizer = load(tiny[family]).tokenizer
    folder = save_adapter(model, tmp_path / "adapter", tiny[family], tokenizer)
    plain = plain_peft(tiny[family], folder)
    base = AutoModelForSequenceClassification.from_pretrained(tiny[family], num_labels=3)
    base.config.pad_token_id = model.config.pad_token_id
    assert (logits(plain) - logits(base)).abs().max() > 0.1
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(plain.merge_and_unload()), logits(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("roles", [["query", "value"], ["query", "value", "output"]], ids="-".join)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_plain_peft_gives_the_same_logits_with_rslora(
    tiny: dict[str, str], tmp_path: Path, family: str, roles: list[str]
) -> None:
    model = trained(tiny[family], LoraSettings(rank=3, alpha=2.0, scaling="rslora", targets=roles))
    folder = save_adapter(model, tmp_path / "adapter", tiny[family], load(tiny[family]).tokenizer)
    assert config_of(folder)["use_rslora"]
    plain = plain_peft(tiny[family], folder)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=1e-5)
    other = trained(tiny[family], LoraSettings(rank=3, alpha=2.0, targets=roles))
    assert (logits(other) - logits(model)).abs().max() > 0.01
    again = trained(tiny[family], LoraSettings(rank=3, alpha=2.0, scaling="rslora", targets=roles), seed=2)
    load_adapter(again, folder)
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(UserError, match=r"adapter_config.json: .* is .*, expected .* as in this model"):
        load_adapter(other, folder)


@pytest.mark.parametrize("roles", [["query", "value"], ["query", "key", "value", "output"]], ids="-".join)
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_plain_peft_gives_the_same_logits_with_dora(
    tiny: dict[str, str], tmp_path: Path, family: str, roles: list[str]
) -> None:
    """GPT-2's projections are one layer in the file, the key's part of it with the base's lengths."""
    settings = LoraSettings(rank=3, alpha=2.0, dora=True, targets=roles)
    model = trained(tiny[family], settings)
    folder = save_adapter(model, tmp_path / "adapter", tiny[family], load(tiny[family]).tokenizer)
    assert config_of(folder)["use_dora"]
    plain = plain_peft(tiny[family], folder)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=1e-5)
    other = trained(tiny[family], replace(settings, dora=False))
    assert (logits(other) - logits(model)).abs().max() > 0.01
    again = trained(tiny[family], settings, seed=2)
    load_adapter(again, folder)
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(UserError, match=r"adapter_config.json: use_dora is True, expected False as in this model"):
        load_adapter(trained(tiny[family], replace(settings, dora=False)), folder)


def test_rslora_is_lora_with_alpha_times_the_root_of_the_rank(tiny: dict[str, str]) -> None:
    stabilised = trained(tiny["bert"], LoraSettings(rank=4, alpha=3.0, scaling="rslora"))
    standard = trained(tiny["bert"], LoraSettings(rank=4, alpha=6.0))
    assert torch.equal(logits(stabilised), logits(standard))


NAMES = {0: "no", 1: "yes", 2: "perhaps"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_alone_gives_a_model_that_answers_with_names(
    tiny: dict[str, str], tmp_path: Path, family: str
) -> None:
    """With transformers alone, with PEFT, merged, and as a pipeline; from another folder than the run's."""
    backbone, model = load(tiny[family]), trained(tiny[family])
    folder = save_adapter(model, tmp_path / "adapter", backbone.base_name, backbone.tokenizer)
    config = AutoConfig.from_pretrained(folder / "base_config.json")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, config=config)
    keys = {key: getattr(config, key) for key in ("id2label", "label2id", "pad_token_id")}
    by_peft = AutoPeftModelForSequenceClassification.from_pretrained(folder, **keys)
    for found in (plain, by_peft):
        assert found.config.id2label == NAMES
        torch.testing.assert_close(logits(found.eval()), logits(model), atol=1e-5, rtol=1e-5)
    by_peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=1e-5)
    text = "the cat sat on the mat"
    expected = NAMES[int(model(**tokenizer(text, return_tensors="pt")).logits.argmax())]
    for found in (plain, merged):
        (answer,) = pipeline("text-classification", model=found, tokenizer=tokenizer)(text)
        assert answer["label"] == expected


def test_two_classes_load_without_being_told_of_them(tiny: dict[str, str], tmp_path: Path) -> None:
    backbone = load_backbone(ModelSettings(name=tiny["bert"]), sequence_head(2, label_names=["no", "yes"]))
    model = attach_lora(backbone, LoraSettings(rank=2))
    folder = save_adapter(model, tmp_path / "adapter", backbone.base_name)
    for auto in (AutoPeftModelForSequenceClassification, AutoModelForSequenceClassification):
        torch.testing.assert_close(logits(auto.from_pretrained(folder).eval().to("cpu")), logits(model))


def test_the_name_of_the_base_leads_to_it_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base", "bert")
    save_tiny(tmp_path / "hub" / "models" / "org" / "base", "bert")
    monkeypatch.chdir(tmp_path)
    head = sequence_head(2)
    assert load_backbone(ModelSettings(name="base"), head).base_name == str((tmp_path / "base").resolve())
    assert load_backbone(ModelSettings(name="org/base"), head, local_hub=str(tmp_path / "hub")).base_name == "org/base"


@pytest.mark.parametrize("roles", ROLES, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_exact(tiny: dict[str, str], tmp_path: Path, family: str, roles: list[str]) -> None:
    lora = LoraSettings(rank=2, alpha=6.0, targets=roles)
    model, other = trained(tiny[family], lora), trained(tiny[family], lora, seed=2)
    before = {name: parameter.data_ptr() for name, parameter in trainable(other).items()}
    load_adapter(other, save_adapter(model, tmp_path / "adapter", tiny[family]))
    assert all(torch.equal(value, values(other)[name]) for name, value in values(model).items())
    assert before == {name: parameter.data_ptr() for name, parameter in trainable(other).items()}
    assert torch.equal(logits(model), logits(other))


LAYERED = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
           "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "phi3": {"num_key_value_heads": 2}, "gpt_neox": {},
    "albert": {"embedding_size": 16}, "deberta-v2": {}, "modernbert": {"cls_token_id": 0, "sep_token_id": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_all_linear_in_other_families(tmp_path: Path, family: str) -> None:
    """Fused layers are adapted whole; plain PEFT and a second model give the same logits."""
    name = save_tiny(tmp_path / "base", family, **LAYERED, **OTHERS[family])
    lora = LoraSettings(rank=2, alpha=6.0, targets="all-linear")
    model, other = trained(name, lora), trained(name, lora, seed=2)
    folder = save_adapter(model, tmp_path / "adapter", name, load(name).tokenizer)
    assert (config_of(folder)["r"], config_of(folder)["rank_pattern"]) == (2, {})
    torch.testing.assert_close(logits(plain_peft(name, folder).eval()), logits(model), atol=1e-5, rtol=1e-5)
    load_adapter(other, folder)
    assert torch.equal(logits(model), logits(other))


def test_gpt2_all_linear_is_the_adapter_that_peft_writes_itself(tiny: dict[str, str], tmp_path: Path) -> None:
    """The fused projection is one layer of it, and an adapter of PEFT's own all-linear is read."""
    lora = LoraSettings(rank=2, alpha=6.0, targets="all-linear")
    config = config_of(save_adapter(trained(tiny["gpt2"], lora), tmp_path / "ours", "base"))
    assert config["target_modules"] == ["c_attn", "c_fc", "c_proj"]
    base = AutoModelForSequenceClassification.from_pretrained(tiny["gpt2"], num_labels=3)
    base.config.pad_token_id = 2
    settings = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=6, target_modules="all-linear", fan_in_fan_out=True)
    theirs = get_peft_model(base, settings).eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    model = trained(tiny["gpt2"], lora)
    load_adapter(model, tmp_path / "theirs")
    torch.testing.assert_close(logits(model), logits(theirs), atol=1e-5, rtol=1e-5)


def test_folder_holds_what_peft_writes_and_the_labels(tiny: dict[str, str], tmp_path: Path) -> None:
    model = trained(tiny["bert"])
    folder = save_adapter(model, tmp_path / "runs" / "adapter", "org/base", load(tiny["bert"]).tokenizer)
    config = config_of(folder)
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "SEQ_CLS"
    assert config["base_model_name_or_path"] == "org/base"
    assert (config["r"], config["lora_alpha"]) == (2, 6.0)
    assert config["target_modules"] == ["query", "value"]
    assert config["modules_to_save"] == ["classifier"]
    assert json.loads((folder / "labels.json").read_text()) == {"0": "no", "1": "yes", "2": "perhaps"}
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "base_config.json", "labels.json", "tokenizer.json",
        "tokenizer_config.json"
    }  # fmt: skip
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]
    by_peft = tmp_path / "by_peft"
    model.save_pretrained(by_peft, save_embedding_layers=False)
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (folder, by_peft))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_label_names_or_tokenizer_neither_is_written(tiny: dict[str, str], tmp_path: Path) -> None:
    backbone = load_backbone(ModelSettings(name=tiny["bert"]), sequence_head(1, regression=True))
    folder = save_adapter(attach_lora(backbone, LoraSettings(rank=2)), tmp_path / "adapter", "base")
    names = ["adapter_config.json", "adapter_model.safetensors", "base_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    config = AutoConfig.from_pretrained(folder / "base_config.json")
    assert (config.num_labels, config.problem_type) == (1, "regression")


def test_gpt2_fusion(tiny: dict[str, str], tmp_path: Path) -> None:
    model = trained(tiny["gpt2"], LoraSettings(rank=2, alpha=6.0))
    folder = save_adapter(model, tmp_path / "adapter", "base")
    config = config_of(folder)
    assert (config["r"], config["lora_alpha"]) == (4, 12.0)
    assert config["target_modules"] == ["c_attn"]
    assert config["fan_in_fan_out"]
    stored = load_file(folder / "adapter_model.safetensors")
    path = "base_model.model.transformer.h.1.attn.c_attn"
    a, b = stored[f"{path}.lora_A.weight"], stored[f"{path}.lora_B.weight"]
    parts = {
        (role, side): model.get_parameter(f"{path}.{role}.lora_{side}.default.weight")
        for role in ("query", "value")
        for side in "AB"
    }
    assert a.shape == (4, 32)
    assert b.shape == (96, 4)
    product = torch.cat([parts["query", "B"] @ parts["query", "A"], torch.zeros(32, 32),
                         parts["value", "B"] @ parts["value", "A"]])  # fmt: skip
    torch.testing.assert_close(b @ a, product)
    assert not b[32:64].any()


def test_gpt2_with_output_keeps_its_rank(tiny: dict[str, str], tmp_path: Path) -> None:
    model = trained(tiny["gpt2"], LoraSettings(rank=2, alpha=6.0, targets=["query", "value", "output"]))
    config = config_of(save_adapter(model, tmp_path / "adapter", "base"))
    assert (config["r"], config["lora_alpha"]) == (2, 6.0)
    assert config["rank_pattern"] == {"c_attn": 4}
    assert config["alpha_pattern"] == {"c_attn": 12.0}
    assert config["target_modules"] == ["attn.c_proj", "c_attn"]


@pytest.mark.slow
def test_real_gpt2_tokenizer_is_saved_with_its_pad_token(tmp_path: Path) -> None:
    hub = local_hub()
    if hub is None or not (hub / "models/openai-community/gpt2").is_dir():
        pytest.skip("no local hub with GPT-2")
    real = AutoTokenizer.from_pretrained(hub / "models/openai-community/gpt2")
    name = save_tiny(tmp_path / "gpt2", "gpt2", vocab_size=len(real), bos_token_id=50256, eos_token_id=50256)
    real.save_pretrained(name)
    backbone = load(name)
    model = attach_lora(backbone, LoraSettings(rank=2))
    for parameter in trainable(model).values():
        parameter.data.normal_(std=0.3)
    folder = save_adapter(model, tmp_path / "adapter", name, backbone.tokenizer)
    texts = ["A sentence.", "Another one, somewhat longer than the first."]
    inputs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    torch.testing.assert_close(plain_peft(name, folder)(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=1e-5)


def test_adapter_trained_by_plain_peft_is_read(tiny: dict[str, str], tmp_path: Path) -> None:
    base = AutoModelForSequenceClassification.from_pretrained(tiny["bert"], num_labels=3)
    config = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=6, target_modules=["query", "value"])
    theirs = get_peft_model(base, config).eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    ours = trained(tiny["bert"])
    load_adapter(ours, tmp_path / "adapter")
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=1e-5)


def test_bfloat16_backbone_exports_float32(tiny: dict[str, str], tmp_path: Path) -> None:
    model = attach_lora(load(tiny["gpt2"], dtype="bfloat16"), LoraSettings(rank=2))
    stored = load_file(save_adapter(model, tmp_path / "adapter", "base") / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_an_adapter_is_replaced_whole_and_anything_else_is_left(tiny: dict[str, str], tmp_path: Path) -> None:
    model, folder = trained(tiny["bert"]), tmp_path / "adapter"
    save_adapter(model, folder, "base", load(tiny["bert"]).tokenizer)
    other = trained(tiny["bert"], seed=2)
    save_adapter(other, folder, "base")
    assert not (folder / "tokenizer.json").exists()
    load_adapter(model, folder)
    assert torch.equal(logits(model), logits(other))
    file, full, empty = tmp_path / "file", tmp_path / "full", tmp_path / "empty"
    file.write_text("kept")
    full.mkdir()
    (full / "thesis.tex").write_text("kept")
    empty.mkdir()
    for taken in (file, full):
        with pytest.raises(UserError, match="is no adapter"):
            save_adapter(model, taken, "base")
    assert (file.read_text(), (full / "thesis.tex").read_text()) == ("kept", "kept")
    assert save_adapter(model, empty, "base") == empty.resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "empty", "file", "full"]


@pytest.mark.parametrize("failing", ["fedllm.models.adapter_files._write", "pathlib.Path.rename"])
def test_failed_save_leaves_the_old_adapter(
    tiny: dict[str, str], tmp_path: Path, monkeypatch: Any, failing: str
) -> None:
    folder, rename = save_adapter(trained(tiny["bert"]), tmp_path / "adapter", "base"), Path.rename
    before = (folder / "adapter_model.safetensors").read_bytes()

    def fail(*args: Any) -> Path:
        if failing.endswith("rename") and not str(args[0]).endswith(".new"):
            return rename(*args)
        raise OSError("disk full")

    other = trained(tiny["bert"], seed=2)
    monkeypatch.setattr(failing, fail)
    with pytest.raises(OSError, match="disk full"):
        save_adapter(other, folder, "base")
    assert (folder / "adapter_model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["adapter"]


KEY = "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"


def _edit(folder: Path, edit: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


DAMAGES = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "not a readable adapter config"),
    "torn config": (lambda folder: (folder / "adapter_config.json").write_text("{"), "not a readable adapter config"),
    "config of another shape": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "not a readable"),
    "another method": (lambda folder: change(folder, peft_type="IA3"), "peft_type is 'IA3', expected 'LORA'"),
    "another rank": (lambda folder: change(folder, r=8), "r is 8, expected 4"),
    "another alpha": (lambda folder: change(folder, lora_alpha=1), r"lora_alpha is 1, expected 12\.0"),
    "another scale": (lambda folder: change(folder, use_rslora=True), "use_rslora is True"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "not a readable safetensors file"),
    "torn weights": (
        lambda folder: os.truncate(folder / "adapter_model.safetensors", 300), "not a readable safetensors file"
    ),
    "missing tensor": (lambda folder: _edit(folder, lambda t: t.pop(KEY)), "1 tensors missing"),
    "unknown tensor": (
        lambda folder: _edit(folder, lambda t: t.update(stranger=torch.ones(1))), r"1 unknown \['stranger'\]"
    ),
    "another shape": (
        lambda folder: _edit(folder, lambda t: t.update({KEY: t[KEY][:, :2].contiguous()})),
        r"float32 \[96, 2\], expected float32 \[96, 4\]",
    ),
    "another dtype": (
        lambda folder: _edit(folder, lambda t: t.update({KEY: t[KEY].half()})), r"float16 \[96, 4\], expected float32"
    ),
    "not finite": (lambda folder: _edit(folder, lambda t: t[KEY][0, 0].fill_(float("nan"))), "not finite"),
    "key rows in use": (lambda folder: _edit(folder, lambda t: t[KEY][40, 0].fill_(1.0)), "separate blocks for query"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_adapter_is_refused_and_the_model_unchanged(tiny: dict[str, str], tmp_path: Path, damage: str) -> None:
    model = trained(tiny["gpt2"])
    folder = save_adapter(model, tmp_path / "adapter", "base")
    other = trained(tiny["gpt2"], seed=2)
    before = values(other)
    inflict, message = DAMAGES[damage]
    inflict(folder)
    with pytest.raises(UserError, match=message):
        load_adapter(other, folder)
    assert all(torch.equal(value, values(other)[name]) for name, value in before.items())


def test_adapter_of_another_model_is_refused(tiny: dict[str, str], tmp_path: Path) -> None:
    folder = save_adapter(trained(tiny["bert"]), tmp_path / "adapter", "base")
    with pytest.raises(UserError, match="is not an adapter of this model"):
        load_adapter(trained(tiny["roberta"]), folder)

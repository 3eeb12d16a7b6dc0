"""A stacked model gives each client's own gradients, in all families, and is as it was after its release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lora_problems import adapted, problem_of, tokens_of
from tiny_models import FAMILIES
from torch import Tensor, nn

from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.quantization import settle
from fedllm.problems.lora.stacked_model import StackedModel
from fedllm.problems.lora.stacked_modules import StackedLinear, StandIn

ALBERT = {
    "hidden_size": 32, "embedding_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
OTHERS = {
    "albert": ALBERT,
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},  # its MLP has all tokens end to end
    "phi3": {**SMALL, "num_key_value_heads": 2},  # query, key and value fused; up and gate fused
    "gpt_neox": SMALL,
    "electra": {**SMALL, "embedding_size": 16},
    "deberta": {**SMALL, "relative_attention": True, "pos_att_type": "p2c|c2p", "max_relative_positions": 8},
    "deberta-v2": SMALL,
    "mistral": {**SMALL, "num_key_value_heads": 2},
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("albert", ALBERT),
    ("gpt2", {"targets": ["output"]}),
    ("llama", {"quantize": "4bit"}),
    ("bert", {"quantize": "8bit"}),
    *((family, {"targets": ["all-linear"]}) for family in FAMILIES),
    *((family, {"targets": ["all-linear"], **settings}) for family, settings in OTHERS.items()),
    ("gpt2", {"targets": ["query", "key", "value", "mlp"]}),
    ("llama", {"targets": ["mlp_gate"]}),
    ("llama", {"targets": ["all-linear"], "quantize": "4bit"}),
    ("gpt2", {"targets": ["all-linear"], "quantize": "8bit"}),
    ("bert", {"scaling": "rslora"}),
    ("bert", {"dora": True}),
    ("gpt2", {"dora": True, "targets": ["query", "value", "mlp"]}),  # its MLP has Conv1D layers
    ("llama", {"dora": True, "targets": ["all-linear"]}),  # no biases
    ("bert", {"train": "B"}),
    ("gpt2", {"train": "B"}),
    ("llama", {"train": "B", "targets": ["all-linear"], "quantize": "4bit"}),
]


def named(family: str, settings: dict[str, Any]) -> str:
    told = filter(None, map(settings.get, ("quantize", "scaling", "train")))
    return "-".join([family, *settings.get("targets", ()), *told, *(["dora"] if "dora" in settings else [])])


@pytest.fixture(scope="module", params=MODELS, ids=[named(*each) for each in MODELS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model without dropout."""
    family, settings = request.param
    if "quantize" in settings:
        pytest.importorskip("bitsandbytes")
    model = adapted(tmp_path_factory.mktemp(family), family, rate=0.0, **settings)
    settle(model.eval(), None)
    return model


def inputs_of(model: Any, count: int) -> dict[str, Tensor]:
    return tokens_of([5] * count).rows(torch.arange(count), pad_id=model.config.pad_token_id)


def parts(model: nn.Module) -> dict[str, Any]:
    """All that must be as it was: modules, hooks, own attributes, and names and storages of values."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "modules": {name: id(module) for name, module in modules.items()},
        "hooks": {name: (list(m._forward_hooks), list(m._forward_pre_hooks)) for name, m in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "parameters": {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)},
        "state": list(model.state_dict()),
        "attention": model.config._attn_implementation,
    }


def test_a_released_model_is_as_it_was(model: Any) -> None:
    inputs = inputs_of(model, 4)
    before, outputs = parts(model), model(**inputs).logits
    space = ParameterSpace.of(model)
    stacked = StackedModel(model, space)
    assert any(isinstance(module, StandIn) for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    assert ParameterSpace.of(model) == space, "names and order of the flat vector hold while the model is stacked"
    if model.config.model_type != "albert":  # transformers checkpoints no layer of it
        stacked.checkpoint_blocks()
    X = stacked.start[None].clone().requires_grad_()
    stacked(X, inputs).sum().backward()
    stacked.release()
    assert parts(model) == before
    torch.testing.assert_close(model(**inputs).logits, outputs, rtol=0, atol=0)
    stacked.stack()
    assert parts(model) != before
    stacked.release()
    assert parts(model) == before


def test_gradients_are_those_of_each_clients_own_model(model: Any) -> None:
    inputs, targets = inputs_of(model, 4), torch.tensor([0, 1, 2, 0])
    space = ParameterSpace.of(model)
    stacked = StackedModel(model, space)
    X = stacked.start + 0.1 * torch.randn(2, space.dim, generator=torch.Generator().manual_seed(0))
    X.requires_grad_()
    losses = F.cross_entropy(stacked(X, inputs), targets, reduction="none").view(2, 2).mean(dim=1)
    losses.sum().backward()
    stacked.release()
    assert X.grad is not None
    for client, (loss, gradient) in enumerate(zip(losses, X.grad, strict=True)):
        space.scatter(model, X[client].detach())
        model.zero_grad()
        rows = slice(2 * client, 2 * client + 2)
        own = F.cross_entropy(model(**{name: value[rows] for name, value in inputs.items()}).logits, targets[rows])
        own.backward()
        torch.testing.assert_close(loss, own, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, space.gather(model, grad=True), rtol=1e-4, atol=1e-5)


def test_a_module_under_two_names_is_replaced_under_both(tmp_path: Path) -> None:
    model = adapted(tmp_path, "bert")
    layers = model.get_base_model().bert.encoder.layer
    layers[1] = layers[0]
    before = parts(model)
    stacked = StackedModel(model, ParameterSpace.of(model))
    assert stacked.checkpoint_blocks() == 1
    assert layers[1] is layers[0]
    assert isinstance(layers[1], StandIn)
    assert isinstance(layers[1].attention.self.query, StandIn)
    stacked.release()
    assert parts(model) == before


def test_after_an_error_no_pass_is_under_way(tmp_path: Path) -> None:
    model = adapted(tmp_path, "bert")
    stacked = StackedModel(model, ParameterSpace.of(model))
    idle = stacked._context.current
    with pytest.raises(ValueError, match="input_ids"):
        stacked(stacked.start[None], {})
    assert stacked._context.current is idle


def test_the_run_folders_adapter_can_be_written_while_stacked(tmp_path: Path) -> None:
    """PEFT finds its layers and their values by class and name."""
    from fedllm.models.adapter_files import adapter_config, adapter_tensors

    model = adapted(tmp_path, "gpt2")
    tensors, config = adapter_tensors(model), adapter_config(model, "base").to_dict()
    problem = problem_of(model, pad_id=2)
    while_stacked = adapter_tensors(model)
    assert while_stacked.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in while_stacked.items())
    assert adapter_config(model, "base").to_dict() == config
    heads = [module for module in model.modules() if isinstance(module, StackedLinear)]
    assert [head.weight.dtype for head in heads] == [torch.float32]
    problem.release()

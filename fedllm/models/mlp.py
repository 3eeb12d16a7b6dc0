"""Finds a model's MLPs (feed-forward networks) by the exact child names of known layouts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from fedllm.blocks.attention import features
from fedllm.common.errors import UserError

LAYOUTS = {
    # architectures: mlp_in, mlp_gate ("" without one) and mlp_out, relative to the module that holds them
    "BERT, RoBERTa, ELECTRA, DeBERTa": ("intermediate.dense", "", "output.dense"),
    "ALBERT": ("ffn", "", "ffn_output"),
    "DistilBERT, XLM": ("lin1", "", "lin2"),
    "Llama, Mistral, Qwen, Gemma": ("up_proj", "gate_proj", "down_proj"),
    "MPT, Nemotron": ("up_proj", "", "down_proj"),
    "Phi-3, GLM": ("gate_up_proj", "gate_up_proj", "down_proj"),
    "GPT-2, GPT-Neo, StarCoder2": ("c_fc", "", "c_proj"),
    "GPT-J, CodeGen": ("fc_in", "", "fc_out"),
    "GPT-NeoX, BLOOM, Falcon": ("dense_h_to_4h", "", "dense_4h_to_h"),
    "OPT, BART, Phi, ViT, Swin, CLIP": ("fc1", "", "fc2"),
    "ModernBERT": ("Wi", "Wi", "Wo"),
    "T5": ("wi", "", "wo"),
    "T5 v1.1": ("wi_1", "wi_0", "wo"),
}


@dataclass(frozen=True)
class Mlp:
    """One MLP: mlp_out(activation(mlp_in(x))), or gated mlp_out(activation(mlp_gate(x)) * mlp_in(x)).

    All are paths of model.named_modules(). name: the module that holds the layers. mlp_gate: "" where there is none;
    equal to mlp_in where one layer computes both.
    """

    name: str
    mlp_in: str
    mlp_gate: str
    mlp_out: str


def find_mlps(model: nn.Module) -> list[Mlp]:
    """Every MLP of known layout in the model's blocks, in module order.

    Raises UserError where the layers of a layout are not linear, or not as wide as the layout says.
    """
    modules = dict(model.named_modules())
    found = []
    for path in filter(block_of, modules):
        for layout in LAYOUTS.values():
            enters, gate, leaves = (f"{path}.{child}" if child else "" for child in layout)
            if all(layer in modules for layer in filter(None, (enters, gate, leaves))):
                _check(modules, enters, leaves, parts=2 if gate == enters else 1)
                found.append(Mlp(path, enters, gate, leaves))
                break
    return found


def block_of(path: str) -> str:
    """The path of the innermost numbered module around `path`, or of itself: a model's blocks are numbered.

    "" for a module outside all blocks, such as an embedding, a pooler or a head.
    """
    parts = path.split(".")
    while parts and not parts[-1].isdecimal():
        parts.pop()
    return ".".join(parts)


def stacked_experts(model: nn.Module) -> tuple[str, str] | None:
    """The first module that holds the weights of several experts as one tensor [experts, ., .], and that tensor's name.

    None for a model without one.
    """
    for path, module in model.named_modules():
        if block_of(path) and not isinstance(module, _ConvNd):
            for name, value in module.named_parameters(recurse=False):
                if value.dim() == 3 and min(value.shape) > 1:
                    return path, name
    return None


def _check(modules: dict[str, nn.Module], enters: str, leaves: str, parts: int) -> None:
    """Raises UserError unless `enters` has `parts` times as many outputs as `leaves` has inputs."""
    widths = []
    for path in (enters, leaves):
        if (sizes := features(modules[path])) is None:
            kind = type(modules[path]).__name__
            raise UserError(f"{path} should be a linear layer of an MLP, found {kind}")
        widths.append(sizes)
    (_, outputs), (inputs, _) = widths
    if outputs != parts * inputs:
        raise UserError(
            f"{enters} has {outputs} outputs, expected {parts * inputs} for the {inputs} inputs of {leaves}"
        )

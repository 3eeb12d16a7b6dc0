"""Modules that stand in the place of a PEFT model's own and compute with the parameters of several clients at once.

The rows of a pass are grouped by client. Frozen layers see one large batch. Beside each of them, the adapters A
[C, r, in] and B [C, out, r] of C clients are two batched matrix products, or a loop where clients differ in rows; so is
each Linear layer of the task head.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from fedllm.common.errors import UserError
from fedllm.models.lora import rows_of_weights
from fedllm.problems.lora.pass_context import PassContext
from fedllm.problems.lora.ragged_lora import ragged_lora

_ADAPTER_PARTS = (
    "lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
)  # fmt: skip


class StandIn(nn.Module):
    """Takes the place of the module `original` of a model, with a forward of its own.

    It shares the original's parameters, buffers, submodules and hooks: parameters keep their names, and what is moved
    or registered in one is moved or registered in both. Settings are copied. All else is read from the original.
    """

    original: nn.Module
    context: PassContext

    def __init__(self, original: nn.Module, context: PassContext) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(original))
        self.__dict__.pop("forward", None)  # a forward that somebody put in the place of the original's
        self.__dict__["original"] = original  # not registered as a submodule
        self.context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)


class StackedLora(StandIn, LoraLayer):
    """y = frozen(x) + scale * dropout(x) A' B', with each client's own A and B, or one A for all if A is not trained.

    Under DoRA, y without the bias is multiplied by m / n, see attach_lora; each client has its own m and n.
    name: of the PEFT layer in the model. number: of its dropout among the model's dropout layers.
    """

    def __init__(self, original: Any, context: PassContext, name: str, number: int) -> None:
        super().__init__(original, context)
        (adapter,) = original.lora_A.keys()
        self.adapter: str = adapter
        self.names = (f"{name}.lora_A.{adapter}.weight", f"{name}.lora_B.{adapter}.weight")
        self.scale, self.number = float(original.scaling[adapter]), number
        self.rate = float(getattr(original.lora_dropout[adapter], "p", 0.0))
        self.lengths = f"{name}.lora_magnitude_vector.{adapter}.weight" if original.lora_magnitude_vector else None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [rows, L, in] of all clients, one client after the other; returns [rows, L, out].

        Tokens that the model lays end to end, [rows * L, in], give [rows * L, out].
        """
        frozen: Tensor = self.base_layer(x, *args, **kwargs)
        if self.lengths is None:
            return self._adapted(x, frozen)
        bias: Any = self.base_layer.bias
        if bias is None:
            return self._lengthened(self._adapted(x, frozen))
        return self._lengthened(self._adapted(x, frozen - bias)) + bias  # type: ignore[no-any-return]

    def _adapted(self, x: Tensor, frozen: Tensor) -> Tensor:
        """frozen + scale * dropout(x) A' B'."""
        now = self.context.current
        A, B = self._matrices(now.parameters)
        x = now.by_rows(x)
        h, packed = now.drop(x, self.rate, self.number).to(A.dtype), now.packed
        if packed is not None and not packed.equal:
            flat = frozen.reshape(-1, frozen.shape[-1])
            h, A, B = (value.to(flat.dtype) for value in (h.flatten(0, 1), A, B))  # DoRA's flat is float32
            return ragged_lora(h, flat, A, B, packed.sizes, self.scale).view_as(frozen)
        h = h.reshape(len(A), -1, h.shape[-1])
        out = frozen.reshape(len(B), -1, frozen.shape[-1])
        # One fused operation: frozen + scale * (h A') B'
        out = torch.baddbmm(out, torch.bmm(h, A.mT).to(out.dtype), B.mT.to(out.dtype), alpha=self.scale)
        return out.view_as(frozen)

    def _lengthened(self, out: Tensor) -> Tensor:
        """out [..., out] times m / n of each row's client."""
        now = self.context.current
        A, B = (matrix.detach().float() for matrix in self._matrices(now.parameters))
        with torch.no_grad():
            W = rows_of_weights(self.base_layer)
            # |w + s b A|^2 of each row w of W and b of B, without the products [C, out, in]
            squares = W.square().sum(dim=1) + 2 * self.scale * (W @ A.mT * B).sum(dim=2)
            squares += self.scale**2 * (B @ (A @ A.mT) * B).sum(dim=2)
        assert self.lengths is not None
        factors = (now.parameters[self.lengths] / squares.sqrt()).to(out.dtype)
        packed, flat = now.packed, out.reshape(-1, out.shape[-1])
        if packed is not None and not packed.equal:
            sizes = torch.tensor(packed.sizes, device=out.device)
            return (flat * factors.repeat_interleave(sizes, dim=0, output_size=len(flat))).view_as(out)
        return (flat.view(len(factors), -1, out.shape[-1]) * factors[:, None]).view_as(out)

    def _matrices(self, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A [C, r, in] and B [C, out, r] of the pass's clients."""
        name_a, name_b = self.names
        B = parameters[name_b]
        if name_a in parameters:
            return parameters[name_a], B
        frozen: Tensor = self.get_parameter(f"lora_A.{self.adapter}.weight")
        return frozen.to(B.dtype).expand(len(B), -1, -1), B


class StackedLinear(StandIn, nn.Linear):
    """y = x W' + b, with each client's own W [C, out, in] and b [C, out]. name: of the layer in the model."""

    def __init__(self, original: nn.Linear, context: PassContext, name: str) -> None:
        super().__init__(original, context)
        self.names = [f"{name}.weight"] + ([f"{name}.bias"] if original.bias is not None else [])

    def forward(self, input: Tensor) -> Tensor:
        """input [samples, ..., in] of all clients, one client after the other; returns [samples, ..., out]."""
        W, *bias = (self.context.current.parameters[name] for name in self.names)
        out = torch.bmm(input.reshape(len(W), -1, input.shape[-1]).to(W.dtype), W.mT)
        for b in bias:
            out = out + b[:, None]
        return out.view(*input.shape[:-1], out.shape[-1])


class CountedDropout(StandIn, nn.Dropout):
    """Dropout drawn from the pass's keys, and not from a generator. number: among the model's dropout layers.

    Attention probabilities, which have four dimensions, are never dropped.
    """

    def __init__(self, original: nn.Dropout, context: PassContext, number: int) -> None:
        super().__init__(original, context)
        self.number = number

    def forward(self, input: Tensor) -> Tensor:
        """input [samples, F], [rows, L, F] or, where a model cuts rows into windows, [rows * windows, tokens, F]."""
        if input.dim() > 3:
            return input
        now = self.context.current
        if now.dropout is None:
            return input
        rows = now.by_rows(input) if input.dim() == 3 else input
        return now.drop(rows, self.p, self.number).view_as(input)


class CheckpointedBlock(StandIn):
    """A block that saves only its input for the backward pass, and is computed again there."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original.forward(*args, **kwargs)
        now = self.context.current
        start = now.fork()

        def compute(*args: Any, **kwargs: Any) -> Any:
            """Runs now, and again in the backward pass, when another pass or none is under way."""
            again = start.fork()
            with self.context.run(again):
                found = self.original.forward(*args, **kwargs)
            now.uses |= again.uses
            return found

        # Nothing is drawn from a generator, dropout included: its state need not be saved.
        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@dataclass(frozen=True)
class StandIns:
    """What make_stand_ins gives. dropouts: how many layers can drop. adapters: the names of all A and B."""

    modules: list[StandIn]
    dropouts: int
    adapters: set[str]


def make_stand_ins(model: nn.Module, trainable: Collection[str], context: PassContext) -> StandIns:
    """A stand-in for each LoRA layer, trainable Linear layer and dropout layer of a PEFT model.

    trainable: names of the trainable parameters. Raises UserError for one that no stand-in computes with.
    """
    modules: list[StandIn] = []
    inside: set[int] = set()  # adapters, which their LoRA layer's stand-in computes with
    dropouts, computed, adapters = 0, set[str](), set[str]()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, LoraLayer):
            inside |= {id(m) for part in _ADAPTER_PARTS for m in getattr(module, part, nn.Module()).modules()}
            lora = StackedLora(module, context, name, dropouts)
            modules.append(lora)
            adapters.update(lora.names)
            computed.update([lora.lengths] if lora.lengths else [])
            dropouts += 1
        elif isinstance(module, nn.Linear) and f"{name}.weight" in trainable:
            linear = StackedLinear(module, context, name)
            modules.append(linear)
            computed.update(linear.names)
        elif isinstance(module, nn.Dropout):
            modules.append(CountedDropout(module, context, dropouts))
            dropouts += 1
    if missing := set(trainable) - computed - adapters:
        raise UserError(
            f"cannot train {sorted(missing)[0]} of several clients at once: expected trainable parameters in LoRA "
            f"layers and in the Linear layers of the task head only"
        )
    return StandIns(modules, dropouts, adapters)


def outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers marks as those that can be checkpointed; of blocks inside each other, the outer."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and id(module) not in inside:
            inside |= {id(inner) for inner in module.modules()}
            blocks.append(module)
    return blocks

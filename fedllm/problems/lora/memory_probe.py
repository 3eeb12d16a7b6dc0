"""What memory a pass needs: measured once, on the longest sample, before training begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedllm.problems.lora.dropout import row_keys
from fedllm.problems.lora.padded_rows import PaddedRows


@dataclass(frozen=True)
class PassMemory:
    """Bytes that a pass saves for its backward: `fixed`, and `token` for each of its tokens."""

    fixed: float
    token: float


def measure(rows: PaddedRows) -> PassMemory:
    """The memory of passes with dropout, from one and two copies of the longest sample of one client."""
    model, longest = rows.model, int(rows.lengths.argmax())
    X = model.start[None].clone().requires_grad_()

    def saved(copies: int) -> int:
        keys = row_keys(0, 0, 0, [0], torch.arange(copies)[None]).to(X.device)
        index = torch.full((copies,), longest)
        return saved_bytes(lambda: rows.outputs_of(X, index, keys), model.model)

    one, two = saved(1), saved(2)
    return PassMemory(2 * one - two, (two - one) / int(rows.lengths[longest]))


def measure_checkpointed(rows: PaddedRows) -> PassMemory:
    """The same with gradient checkpointing, which this switches on for good.

    At its fullest, such a pass has the inputs of all blocks and the activations of one.
    Raises UserError for a model without blocks that can be checkpointed.
    """
    activations = measure(rows).token
    blocks = rows.model.checkpoint_blocks()
    inputs = measure(rows)
    return PassMemory(inputs.fixed, inputs.token + activations / blocks)


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module) -> int:
    """Bytes that autograd saves between a forward and its backward pass, the model's own tensors not counted."""
    saved: dict[int, Tensor] = {}

    def note(value: Tensor) -> None:
        """Keeps the values, so that no address is used twice. The graph gets nothing: a tensor that an operation gave
        and saved would keep itself alive for ever."""
        saved[value.untyped_storage().data_ptr()] = value.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, _no_backward):
        forward()
    own = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
    return sum(value.untyped_storage().nbytes() for address, value in saved.items() if address not in own)


def _no_backward(_: None) -> Tensor:
    raise AssertionError("the graph of the probe has no backward pass")

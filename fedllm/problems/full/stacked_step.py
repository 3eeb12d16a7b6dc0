"""The gradients of several clients in one pass over all of their weights, by torch.func."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedllm.common.errors import UserError
from fedllm.common.memory import out_of_memory
from fedllm.common.profiling import section
from fedllm.problems.contrast import Term
from fedllm.problems.full.batch_reader import BatchReader, StackedBatch
from fedllm.problems.full.learned_places import sums
from fedllm.problems.full.plain_model import Mode, PlainModel
from fedllm.problems.model_problem import Losses


def stacked_step(
    model: PlainModel, losses: Losses, X: Tensor, batch: StackedBatch, term: Term | None = None
) -> tuple[Tensor, Tensor]:
    """Mini-batch losses [C] and gradients [C, d] of C clients with weights X [C, d]. Nothing may be drawn at random.

    term: the representations, which are shown, and the clients' contrast.
    """
    places = None if batch.places is None else batch.places.tensors

    def outputs_of(x: Tensor, inputs: dict[str, Tensor], places: object) -> Tensor:
        logits = model.logits(x, None, inputs)
        return logits if places is None else sums(logits, places)  # type: ignore[arg-type]

    def loss(
        x: Tensor, inputs: dict[str, Tensor], targets: Tensor, weight: Tensor, places: object, *others: Tensor
    ) -> Tensor:
        of_each = losses if term is None else term[0].add(losses, term[1], *others)
        return (of_each(outputs_of(x, inputs, places), targets) * weight).sum()

    # The fused attention of a CPU has no rule for stacked clients: torch.func would loop over them.
    with section("forward"), sdpa_kernel(SDPBackend.MATH):
        dims = (0, 0, None if places is None else 0)
        others: list[Tensor] = []
        if term is not None:
            with torch.no_grad():
                rows = torch.func.vmap(outputs_of, in_dims=dims)
                others = [rows(each, batch.inputs, places) for each in (term[1].near, term[1].far)]
        in_dims = (0, 0, 0, 0, dims[2], *[0] * len(others))
        stacked = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=in_dims)
        gradients, found = stacked(X.detach(), batch.inputs, batch.targets, batch.weight, places, *others)
    return found.detach(), gradients.detach()


def require_stackable(model: PlainModel, reader: BatchReader, losses: Losses) -> None:
    """Raises UserError unless the model can train several clients in one pass: it has no batch norm, drops nothing, and
    torch.func can compute it."""
    advice = "train one after the other with run.stacked_clients=1 or auto"
    if model.buffers.dim:
        raise UserError(f"{type(model.model).__name__} has batch norm, which mixes stacked clients; {advice}")
    longest = int(reader.lengths.argmax())
    batch = reader.stack([np.array([longest]), np.array([longest])], model.start.device)
    try:
        with model.mode(Mode.TRAIN):
            stacked_step(model, losses, model.start.repeat(2, 1), batch)
    except Exception as error:  # torch.func has no rule for an operation, or one draws at random
        if out_of_memory(error):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{type(model.model).__name__} cannot train stacked clients ({said}); {advice}") from error

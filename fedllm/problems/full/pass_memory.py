"""What memory a pass over all weights needs: measured once, on the longest sample, before training begins."""

from __future__ import annotations

import numpy as np
from torch import nn

from fedllm.common.errors import UserError
from fedllm.common.memory import out_of_memory
from fedllm.problems.full.batch_reader import BatchReader
from fedllm.problems.full.plain_model import Mode, PlainModel
from fedllm.problems.lora.memory_probe import PassMemory, saved_bytes


def measure(model: PlainModel, reader: BatchReader) -> PassMemory:
    """Bytes that a pass saves for its backward, from two and four copies of the longest sample, and its workspace.

    Raises UserError where the model cannot compute the samples.
    """
    longest = int(reader.lengths.argmax())
    x = model.start.clone().requires_grad_()
    own = nn.ParameterList([nn.Parameter(x, requires_grad=False)])  # the same storage: weights are not counted

    def saved(copies: int) -> int:
        batch = reader.read(np.full(copies, longest), x.device)
        return saved_bytes(lambda: model.outputs(x, model.first_buffers.clone(), batch), own)

    try:
        with model.mode(Mode.TRAIN):
            two, four = saved(2), saved(4)
    except Exception as error:  # the model's own code, which may fail in any way
        if out_of_memory(error):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{type(model.model).__name__} cannot compute a sample of the data: {said}") from error
    return PassMemory(2 * two - four + model.workspace, (four - two) / (2 * int(reader.lengths[longest])))

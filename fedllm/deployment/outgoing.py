"""What one client sends of a finished local round."""

from __future__ import annotations

from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import Algorithm
from fedllm.common.errors import RunError
from fedllm.common.tensors import State


def outgoing(
    uploads: Uploads, declared: Declared, pipeline: Pipeline, algorithm: Algorithm, *, tracked: bool, round: int
) -> State:
    """The tensors that one client sends, after the steps on uploads and with the server's checks; see Pipeline.wire.

    uploads: of this client alone; `kept` is then what it keeps. tracked: whether it sends what tracked clients send.
    round: from 0, for errors. Raises RunError, naming the tensor, if what is sent or kept is not finite.
    """
    pipeline.send(uploads, declared, 1)
    left_out = () if tracked else algorithm.tracked_uploads()
    sent = pipeline.wire(uploads, [name for name in uploads.sent if name not in left_out])
    pipeline.receive(uploads, declared, 1)  # the same checks as on the server
    for why in uploads.rejected.values():
        raise RunError(
            f"round {round + 1}: {why}; nothing was sent, and the client's state is as before the round. "
            "Lower algorithm.lr, set algorithm.clip_norm, or look for bad values in the round's batches"
        )
    return sent

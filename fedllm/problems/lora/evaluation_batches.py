"""Evaluation in large batches of samples of similar length, cut into smaller ones if memory runs out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedllm.common.memory import HalvingBatches


def evaluation_batches(lengths: np.ndarray, most: float) -> list[list[int]]:
    """All samples, the longest first, in batches of at most `most` tokens with padding, but of at least one sample.

    lengths [n]: tokens of each sample.
    """
    order = np.argsort(lengths, kind="stable")[::-1].tolist()
    batches = []
    while order:
        rows = max(1, int(min(len(order), most / int(lengths[order[0]]))))
        batches.append(order[:rows])
        order = order[rows:]
    return batches


def evaluate(
    outputs_of: Callable[[Tensor], Tensor], lengths: np.ndarray, batches: list[list[int]], cuts: int
) -> tuple[Tensor, int]:
    """Outputs [n, L] of the samples in `batches`, zeros for all others, and the cuts at the end.

    outputs_of: outputs [m, L] of some samples [m]. lengths [n]: tokens of each sample. cuts: how many parts each batch
    is computed in; where memory gives out, that batch and all after it are cut into more.
    Raises RunError where a sample alone does not fit.
    """

    def too_large(sample: int) -> str:
        return (
            f"evaluation: a sample of {int(lengths[sample])} tokens alone does not fit into memory; lower "
            f"data.max_length, or run fewer processes on this machine"
        )

    found: Tensor | None = None
    for batch in batches:
        parts = HalvingBatches(batch, -(-len(batch) // cuts), too_large)
        for index, outputs in parts.each(lambda index: outputs_of(torch.tensor(index))):
            found = outputs.new_zeros(len(lengths), outputs.shape[1]) if found is None else found
            found[index] = outputs
        if parts.forced:
            cuts = -(-len(batch) // parts.forced)
    assert found is not None, "evaluation needs at least one sample"
    return found, cuts

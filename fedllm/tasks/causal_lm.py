"""The next token of a text: supervised fine-tuning of causal language models."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fedllm.common.console import ProgressCallback
from fedllm.data.loading import Split
from fedllm.data.tokenization import Tokens
from fedllm.tasks.base import LOSS, Task
from fedllm.tasks.heads import language_head

SCORES = ("token_accuracy", "perplexity", "exact_match")


class CausalLM(Task):
    """The learned tokens of each sample, predicted from the tokens before them; the loss is the cross-entropy.

    Outputs are sums over the learned tokens of each sample [n, 4]: the cross-entropy, the number of tokens, those that
    are the model's likeliest, and 1 where all are. token_accuracy: the share of the likeliest. perplexity: exp of the
    mean loss per token. exact_match: the share of samples whose learned tokens are all the likeliest; greedy decoding
    gives exactly these responses, if they end in eos.
    """

    def __init__(self) -> None:
        self.head = language_head()
        self.metric_names = SCORES

    def describe(self) -> str:
        return "next tokens"

    def encode(self, split: Split, encoder: Any, max_length: int, progress: ProgressCallback | None = None) -> Tokens:
        raise NotImplementedError

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0]

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        loss, tokens, right, whole = outputs.double().sum(dim=0).tolist()
        mean = loss / tokens
        scores = (right / tokens, math.exp(mean) if mean < 700 else math.inf, whole / len(outputs))
        return {LOSS: mean, **dict(zip(SCORES, scores, strict=True))}

    def predictions(self, outputs: Tensor) -> list[Any]:
        raise NotImplementedError("the answers of a language model are generated, token by token")

"""The next token of a text: supervised fine-tuning of causal language models."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fedllm.common.console import ProgressCallback
from fedllm.data.conversations.encoding import encode_conversations
from fedllm.data.conversations.options import Options, encode_options
from fedllm.data.loading import Split
from fedllm.data.settings import DataSettings
from fedllm.data.tokenization import Tokens
from fedllm.tasks.base import LOSS, PERPLEXITY, Task
from fedllm.tasks.heads import language_head

SCORES = ("token_accuracy", PERPLEXITY, "exact_match")
CHOICE_SCORES = ("choice_accuracy", "choice_accuracy_norm")


class CausalLM(Task):
    """The learned tokens of each sample, predicted from the tokens before them; the loss is the cross-entropy.

    Outputs are sums over the learned tokens of each sample [n, 4]: the cross-entropy, the number of tokens, those that
    are the model's likeliest, and 1 where all are. token_accuracy: the share of the likeliest. perplexity: exp of the
    mean loss per token. exact_match: the share of samples whose learned tokens are all the likeliest; greedy decoding
    gives exactly these responses, if they end in eos.
    """

    generates = True

    def __init__(self, settings: DataSettings | None = None) -> None:
        """settings: the template, and what is learned and cut; by default those of a recipe that gives none."""
        self._settings = settings or DataSettings(task="causal_lm")
        self.head = language_head()
        self.metric_names = (*CHOICE_SCORES, *SCORES) if self._settings.choices else SCORES

    def describe(self) -> str:
        return "next tokens"

    def encode(self, split: Split, encoder: Any, max_length: int, progress: ProgressCallback | None = None) -> Tokens:
        return encode_conversations(split, encoder, self._settings, max_length, progress)

    def options(self, split: Split, tokenizer: Any, max_length: int) -> Options | None:
        return encode_options(split, tokenizer, self._settings, max_length)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0]

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        loss, tokens, right, whole = outputs.double().sum(dim=0).tolist()
        mean = loss / tokens
        scores = (right / tokens, math.exp(mean) if mean < 700 else math.inf, whole / len(outputs))
        return {LOSS: mean, **dict(zip(SCORES, scores, strict=True))}

    def choose(self, outputs: Tensor, options: Options) -> dict[str, float]:
        """The scores of multiple-choice questions, as the LM Evaluation Harness defines acc and acc_bytes: the share of
        questions of which the right option is the likeliest one. choice_accuracy: by the sum of its tokens'
        log-likelihoods; choice_accuracy_norm: by this sum per byte. outputs [n, 4]: of the options."""
        likelihoods = -outputs[:, 0].double()
        values = (likelihoods, likelihoods / options.bytes)
        return {name: options.accuracy(value) for name, value in zip(CHOICE_SCORES, values, strict=True)}

    def predictions(self, outputs: Tensor) -> list[Any]:
        raise NotImplementedError("the answers of a language model are generated, token by token")

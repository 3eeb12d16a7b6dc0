"""All weights of a language model: the losses and gradients are transformers' own, without the logits of all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from causal_problems import FAMILIES, causal_model, causal_tokens, plain_loss
from full_models import full_problem
from peak_bytes import peak_bytes
from torch import nn
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fedllm.data.tokenization import Tokens
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.problems.full.problem import FullProblem
from fedllm.problems.lora import frozen_head


def trainable(family: str) -> PreTrainedModel:
    return causal_model(family).requires_grad_(True)


def problem_of(model: nn.Module, samples: Tokens | None = None, **options: Any) -> FullProblem:
    return full_problem(model, samples or causal_tokens(), clients=3, batch_size=4, **options)


@pytest.mark.parametrize(("family", "chunk"), [*((family, 7) for family in FAMILIES), ("gpt2", 1), ("gpt2", 1000)])
def test_loss_and_gradient_are_transformers_own(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied and untied heads, scaled and capped logits; as many tokens at a time as `chunk` says."""
    problem = problem_of(trainable(family))
    assert problem.model.tokens is not None
    monkeypatch.setitem(frozen_head.CHUNK, "cpu", chunk * 50)
    X = problem.initial() + 0.02 * torch.randn(3, problem.dim, generator=torch.Generator().manual_seed(4))
    losses, gradients = problem.loss_and_gradient(X, [0, 1, 2], 0, 0)
    plain = trainable(family)
    for client in range(3):
        problem.space.scatter(plain, X[client])
        plain.zero_grad()
        loss = plain_loss(plain, causal_tokens(), problem.batches.indices(client, 0, 0).tolist())
        loss.backward()  # type: ignore[no-untyped-call]
        expected = problem.space.gather(plain, grad=True)
        assert float(losses[client]) == pytest.approx(loss.item(), rel=2e-6)
        assert (gradients[client] - expected).norm() < 3e-6 * expected.norm()


def test_a_bias_of_the_head_is_trained() -> None:
    def make() -> PreTrainedModel:
        model = trainable("llama")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model.lm_head = nn.Linear(32, 50)
        return model

    problem, plain = problem_of(make()), make()
    assert problem.model.tokens is not None
    loss = plain_loss(plain, causal_tokens(), problem.batches.indices(1, 0, 0).tolist())
    loss.backward()  # type: ignore[no-untyped-call]
    expected = ParameterSpace.of(plain).gather(plain, grad=True)
    (found,) = problem.gradient(problem.initial()[None], [1], 0, 0)
    assert (found - expected).norm() < 3e-6 * expected.norm()
    assert expected[-50:].norm() > 0.01, "the bias comes last"


def test_a_weighted_loss_has_its_gradient() -> None:
    """Tokens of different weights: a gradient made for a mean alone would be another."""
    problem = problem_of(trainable("qwen2"))
    batch = problem.reader.read(np.arange(3), torch.device("cpu"))
    weights = torch.tensor([1.0, -2.0, 0.25])
    found = []
    for tokens in (problem.model.tokens, None):
        problem.model.tokens = tokens
        x = problem.initial().requires_grad_()
        (weights * problem.model.outputs(x, None, batch)[:, 0]).sum().backward()  # type: ignore[no-untyped-call]
        found.append(x.grad)
    assert (found[0] - found[1]).norm() < 3e-6 * found[1].norm()


def test_in_bfloat16_they_are_as_near_as_the_whole_logits() -> None:
    """The head's products are those of autocast: the same rounding, in forward and backward."""
    exact = problem_of(trainable("llama"))
    low = problem_of(trainable("llama"), autocast=torch.bfloat16)
    X = exact.initial()[None]
    (a,), (G,) = exact.loss_and_gradient(X, [0], 0, 0)
    (b,), (H,) = low.loss_and_gradient(X, [0], 0, 0)
    low.model.tokens = None
    (c,), (K,) = low.loss_and_gradient(X, [0], 0, 0)
    assert abs(b - c) < 1e-3 * abs(a)
    assert 0 < (G - H).norm() < 1.5 * (G - K).norm()


def test_a_model_with_more_than_an_output_embedding_keeps_its_own_logits() -> None:
    """A BERT that is a decoder has a layer before its output embedding."""
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
        use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = BertLMHeadModel(config).eval()
    problem = problem_of(model)
    assert problem.model.tokens is None
    (loss,), _ = problem.loss_and_gradient(problem.initial()[None], [0], 0, 0)
    expected = plain_loss(model, causal_tokens(), problem.batches.indices(0, 0, 0).tolist())
    assert float(loss) == pytest.approx(expected.item(), rel=2e-6)


def test_memory_does_not_grow_with_tokens_by_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 words and 480 learned tokens: their logits alone are 38 MB, many times the model's 2.6 MB."""
    config = LlamaConfig(
        vocab_size=20_000, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = LlamaForCausalLM(config).eval()
    monkeypatch.setitem(frozen_head.CHUNK, "cpu", 20 * 20_000)
    samples = causal_tokens([61] * 8, [60] * 8)
    problem = full_problem(model, samples, clients=1, batch_size=8)
    logits = 4 * 480 * 20_000
    X = problem.initial()[None]
    fused = peak_bytes(lambda: problem.gradient(X, [0], 0, 0))
    read = peak_bytes(lambda: problem.outputs(X[0], samples))
    problem.model.tokens = None
    whole = peak_bytes(lambda: problem.gradient(X, [0], 0, 0))
    assert whole > 3 * logits
    assert fused < logits / 2
    assert read < logits / 2

"""Language models: losses and gradients are those of transformers' own loss, for every way to lay out and to cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from causal_problems import (
    FAMILIES,
    LEARNED,
    LENGTHS,
    adapted_causal,
    causal_model,
    causal_problem,
    causal_tokens,
    plain_loss,
)
from peak_bytes import peak_bytes
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from fedllm.common.errors import UserError
from fedllm.problems.lora.frozen_head import FrozenHead
from fedllm.problems.lora.packed_rows import PackedRows
from fedllm.problems.lora.problem import LoraProblem
from fedllm.tasks.causal_lm import CausalLM


def points(problem: LoraProblem, clients: int = 3) -> Tensor:
    """Other parameters for each client."""
    noise = torch.randn(clients, problem.dim, generator=torch.Generator().manual_seed(3))
    return problem.initial() + 0.05 * noise


def plain_gradient(model: Any, problem: LoraProblem, x: Tensor, samples: list[int]) -> tuple[float, Tensor]:
    """Loss and gradient [d] of one client by plain PEFT and transformers."""
    problem.space.scatter(model, x)
    model.zero_grad()
    loss = plain_loss(model, causal_tokens(), samples)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), torch.cat([value.grad.reshape(-1) for value in model.parameters() if value.requires_grad])


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_transformers_own(family: str, flat: bool) -> None:
    """With all samples in one row, and in packed rows of one length. Gemma 2 caps attention scores in code of its own,
    which knows rows alone."""
    problem = causal_problem(adapted_causal(family))
    assert isinstance(problem.rows, PackedRows)
    assert problem.rows.flat == (family != "gemma2")
    problem.rows = replace(problem.rows, flat=flat and problem.rows.flat)
    X = points(problem)
    losses, gradients = problem.loss_and_gradient(X, [0, 1, 2], 0, 0)
    model = adapted_causal(family)
    for client in range(3):
        loss, gradient = plain_gradient(model, problem, X[client], problem.batches.indices(client, 0, 0).tolist())
        assert float(losses[client]) == pytest.approx(loss, rel=2e-6)
        assert (gradients[client] - gradient).norm() < 3e-6 * gradient.norm()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "settings", [{"slices": 1}, {"slices": 3}, {"pass_bytes": 1.0}, {"checkpointing": True}], ids=str
)
def test_every_cut_gives_the_same(family: str, settings: dict[str, Any]) -> None:
    whole, cut = causal_problem(adapted_causal(family)), causal_problem(adapted_causal(family), **settings)
    X = points(whole)
    (a, G), (b, H) = (problem.loss_and_gradient(X, [0, 1, 2], 0, 0) for problem in (whole, cut))
    assert torch.allclose(a, b, rtol=1e-6)
    assert (G - H).norm() < 1e-6 * G.norm() * 3


@pytest.mark.parametrize("settings", [{}, {"slices": 2}, {"pass_bytes": 1.0}], ids=str)
def test_every_learned_token_counts_the_same(settings: dict[str, Any]) -> None:
    """Oracle of TASKS.md, 4.4.5: responses of 1 and 100 tokens give (l1 + l100) / 101, also in parts."""
    model = causal_model("llama")
    model.config.max_position_embeddings = 128
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    problem = causal_problem(
        get_peft_model(model, lora).eval(), causal_tokens([3, 102], [1, 100]), clients=1, **settings
    )
    sums = problem.outputs(problem.initial(), problem.samples)
    assert sums[:, 1].tolist() == [1, 100]
    loss, _ = problem.loss_and_gradient(problem.initial()[None], [0], 0, 0)
    assert float(loss) == pytest.approx(float(sums[:, 0].sum()) / 101, rel=1e-6)


def test_the_full_gradient_is_over_all_tokens_of_a_client() -> None:
    problem = causal_problem(adapted_causal("llama"), batch_size=3)
    found = problem.full_gradient(problem.initial(), [0, 2])
    model = adapted_causal("llama")
    for row, client in enumerate([0, 2]):
        _, gradient = plain_gradient(model, problem, problem.initial(), problem.batches.parts[client].tolist())
        assert (found[row] - gradient).norm() < 3e-6 * gradient.norm()


def test_dropout_is_drawn_for_each_sample() -> None:
    """The same masks in packed and padded rows, for one client and three."""
    packed = causal_problem(adapted_causal("llama", dropout=0.3))
    padded = causal_problem(adapted_causal("llama", dropout=0.3), slices=2)
    X = points(packed)
    losses, G = packed.loss_and_gradient(X, [0, 1, 2], 1, 0)
    assert (padded.loss_and_gradient(X, [0, 1, 2], 1, 0)[1] - G).norm() < 3e-6 * G.norm()
    alone = packed.loss_and_gradient(X[1:2], [1], 1, 0)
    assert (alone[1][0] - G[1]).norm() < 3e-6 * G[1].norm()
    assert not torch.allclose(losses, packed.loss_and_gradient(X, [0, 1, 2], 2, 0)[0], rtol=1e-3)


def test_rows_with_other_neighbours_and_later_tokens_change_nothing() -> None:
    problem = causal_problem(adapted_causal("llama"))
    x = problem.initial()
    before = problem.outputs(x, causal_tokens())
    other = causal_tokens()
    other.input_ids[other.offsets[3] : other.offsets[4]] = 7
    after = problem.outputs(x, other)
    others = [sample for sample in range(len(LENGTHS)) if sample != 3]
    assert torch.allclose(before[others], after[others], rtol=1e-6)
    first = causal_tokens()
    first.learned[:] = False
    first.learned[first.offsets[:-1] + 1] = True  # the second token of each sample
    losses = problem.outputs(x, first)[:, 0]
    first.input_ids[first.offsets[1:] - 1] = 9
    assert torch.allclose(problem.outputs(x, first)[:, 0], losses, rtol=1e-6)


def test_another_pad_token_changes_nothing() -> None:
    """Every sample ends in token 2, which is also the pad token."""
    found = [causal_problem(adapted_causal("gpt2"), pad_id=pad, slices=1) for pad in (2, 11)]
    X = points(found[0])
    (a, G), (b, H) = (problem.loss_and_gradient(X, [0, 1, 2], 0, 0) for problem in found)
    assert torch.allclose(a, b, rtol=1e-6)
    assert (G - H).norm() < 3e-6 * G.norm()


@pytest.mark.parametrize("parts", [1, 3])
def test_the_outputs_are_sums_over_the_learned_tokens(parts: int) -> None:
    problem, tokens = causal_problem(adapted_causal("qwen2")), causal_tokens()
    model = adapted_causal("qwen2")
    found = sum(problem.outputs(problem.initial(), tokens, part, parts) for part in range(parts))
    assert found[:, 1].tolist() == LEARNED
    for sample, learned in enumerate(LEARNED):
        begin, end = tokens.offsets[sample : sample + 2].tolist()
        ids = tokens.input_ids[begin:end].long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        ours = logits[-learned - 1 : -1]
        assert float(found[sample, 0]) == pytest.approx(
            float(F.cross_entropy(ours, ids[-learned:], reduction="sum")), rel=1e-5
        )
        right = int((ours.argmax(dim=-1) == ids[-learned:]).sum())
        assert found[sample, 2:].tolist() == [right, float(right == learned)]


def test_exact_match_is_what_greedy_decoding_gives() -> None:
    """The responses are the model's own greedy continuations, but for one token in every second sample."""
    model = adapted_causal("llama")
    responses, lengths = [], []
    for sample in range(6):
        prompt = torch.randint(3, 50, (1, 6), generator=torch.Generator().manual_seed(sample))
        with torch.no_grad():
            ids = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=5,
                use_cache=True, eos_token_id=None, pad_token_id=2,
            )[0]  # fmt: skip
        if sample % 2:
            ids[8] = (ids[8] + 1) % 50
        responses.append(ids.int())
        lengths.append(len(ids))
    tokens = causal_tokens(lengths, [5] * 6)
    tokens.input_ids[:] = torch.cat(responses)
    problem = causal_problem(model)
    found = problem.outputs(problem.initial(), tokens)
    assert found[:, 3].tolist() == [1.0, 0.0] * 3
    scores = CausalLM().evaluate(found, tokens.targets)
    assert scores["exact_match"] == 0.5
    assert scores["perplexity"] == pytest.approx(np.exp(scores["eval_loss"]))


# The frozen head


def hidden_and_targets() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(37, 16, generator=draw, requires_grad=True), torch.randint(0, 90, (37,), generator=draw)


@pytest.mark.parametrize("chunk", [37, 64, 10, 1])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, 0.0), (0.3, 0.0), (2.0, 4.0)])
def test_the_fused_loss_is_the_cross_entropy(chunk: int, scale: float, cap: float) -> None:
    torch.manual_seed(0)
    head = FrozenHead(nn.Linear(16, 90).requires_grad_(False), scale, cap)
    hidden, targets = hidden_and_targets()
    losses, right = head.losses(hidden, targets, chunk)
    slopes = torch.randn(37, generator=torch.Generator().manual_seed(2))
    losses.backward(slopes)
    plain = hidden.detach().clone().requires_grad_()
    logits = head.layer(plain) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    expected = F.cross_entropy(logits, targets, reduction="none")
    expected.backward(slopes)
    if chunk >= 37:
        assert torch.equal(losses, expected)
    assert torch.allclose(losses, expected, rtol=1e-6)
    assert (hidden.grad - plain.grad).norm() < 1e-6 * plain.grad.norm()
    assert torch.equal(right.bool(), logits.argmax(dim=1) == targets)


def test_no_more_than_a_chunk_of_logits_exists_at_a_time() -> None:
    """Oracle of TASKS.md, 4.4.2: at 2,048 tokens the peak is below a fifth of that of the whole logits."""
    head = FrozenHead(nn.Linear(16, 5000, bias=False).requires_grad_(False))
    hidden, targets = torch.randn(2048, 16, requires_grad=True), torch.zeros(2048, dtype=torch.long)

    def whole() -> None:
        F.cross_entropy(head.layer(hidden), targets).backward()

    fused = peak_bytes(lambda: head.losses(hidden, targets, chunk=64)[0].sum().backward())
    assert fused < peak_bytes(whole) / 5


def test_no_more_than_a_chunk_of_logits_is_kept() -> None:
    """Of 2,048 tokens over 5,000 words: less than a fifth of the bytes of all logits is saved for the backward pass."""
    head = FrozenHead(nn.Linear(16, 5000, bias=False).requires_grad_(False))
    hidden = torch.randn(2048, 16, requires_grad=True)
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        head.losses(hidden, torch.zeros(2048, dtype=torch.long), chunk=64)
    assert sum(kept.values()) <= 2 * 4 * 2048 * 16


def test_a_token_whose_logits_are_not_numbers_is_wrong() -> None:
    head = FrozenHead(nn.Linear(4, 3, bias=False).requires_grad_(False))
    losses, right = head.losses(torch.full((2, 4), torch.nan), torch.tensor([0, 1]))
    assert losses.isnan().all()
    assert right.tolist() == [0.0, 0.0]


def test_a_head_that_does_more_than_its_output_embedding_is_refused() -> None:
    model = adapted_causal("llama")
    causal = model.base_model.model
    plain = causal.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        found.logits = found.logits * 2
        return found

    causal.forward = doubled
    with pytest.raises(UserError, match=r"LlamaForCausalLM .* its logits are not those of its output embedding"):
        causal_problem(model)

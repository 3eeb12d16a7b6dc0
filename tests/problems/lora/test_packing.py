"""Several samples in one row: nothing lost or mixed, the same numbers as with a row a sample, in all families."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, save_tiny
from torch import nn

from fedllm.config.recipe import load_recipe
from fedllm.data.loading import Split
from fedllm.data.tokenization import Tokens
from fedllm.experiment.build import Job, assemble
from fedllm.problems.lora.packed_rows import PackedRows
from fedllm.problems.lora.packing import Packed, PackedFormat, find_format, pack
from fedllm.problems.lora.ragged_lora import ragged_lora


def tokens_of(lengths: list[int], types: bool = False) -> Tokens:
    """Samples of these lengths; token k of all has the id k + 1."""
    total = sum(lengths)
    return Tokens(
        input_ids=torch.arange(1, total + 1, dtype=torch.int32),
        token_type_ids=torch.arange(total).remainder(2).to(torch.uint8) if types else None,
        offsets=torch.tensor([0, *np.cumsum(lengths)]),
        targets=torch.zeros(len(lengths), dtype=torch.long),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_sample_lies_whole_and_alone_in_a_row_of_its_client(data: st.DataObject) -> None:
    clients, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=clients * width, max_size=clients * width))
    causal = data.draw(st.booleans())
    equal, flat = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    tokens = tokens_of(lengths, types=True)
    samples = np.arange(clients * width).reshape(clients, width)
    for client in range(clients):
        samples[client, data.draw(st.integers(1, width)) :] = -1
    packed = pack(tokens, samples, PackedFormat(causal, first_position=2), equal=equal, flat=flat, pad_id=0)
    ids, length = packed.inputs["input_ids"].flatten(), packed.inputs["input_ids"].shape[1]
    owners = np.repeat(np.arange(clients), packed.sizes)
    for place, sample in enumerate(samples.flatten()):
        if sample < 0:
            assert owners[packed.reads[place]] == place // width
            continue
        begin, end = tokens.offsets[sample : sample + 2].tolist()
        (first,) = (ids == begin + 1).nonzero().flatten().tolist()
        where = slice(first, first + end - begin)
        assert ids[where].tolist() == list(range(begin + 1, end + 1))
        assert first // length == (where.stop - 1) // length
        assert owners[first] == place // width
        assert packed.inputs["position_ids"].flatten()[where].tolist() == list(range(2, 2 + end - begin))
        assert packed.position.flatten()[where].tolist() == list(range(end - begin))
        assert torch.equal(packed.inputs["token_type_ids"].flatten()[where], tokens.token_type_ids[begin:end].long())
        assert (packed.sample.flatten()[where] == place).all()
        assert packed.reads[place] == (where.stop - 1 if causal else first)
    assert int((ids > 0).sum()) == sum(lengths[sample] for sample in samples.flatten() if sample >= 0)
    assert packed.equal or not equal
    if flat:
        assert packed.inputs["input_ids"].shape == (1, int((ids > 0).sum()))
        assert packed.mask(torch.float32).isnan().all()
    else:
        assert_own_sample_only(packed, ids, causal)


def assert_own_sample_only(packed: Packed, ids: torch.Tensor, causal: bool) -> None:
    mask = packed.mask(torch.float32)[:, 0].exp() == 1  # 0 and -inf
    owner = packed.sample
    assert torch.equal(owner < 0, ids.view(owner.shape) == 0)
    expected = owner[:, :, None] == owner[:, None, :]
    assert torch.equal(mask, expected.tril() if causal else expected)
    assert mask.diagonal(dim1=1, dim2=2).all()  # no token without any to attend to, which would make NaN


def test_short_samples_share_rows() -> None:
    packed = pack(tokens_of([10, 4, 3, 3]), np.arange(4)[None], PackedFormat(False, 0))
    assert packed.inputs["input_ids"].shape == (2, 10)
    assert packed.sizes == [20]


@pytest.mark.parametrize("counts", [[3, 1, 4], [2, 2, 2]])
def test_ragged_lora_is_each_clients_own(counts: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw).requires_grad_()

    x, frozen, A, B = normal(sum(counts), 5), normal(sum(counts), 4), normal(3, 2, 5), normal(3, 4, 2)
    found = ragged_lora(x, frozen, A, B, counts, 0.5)
    parts = zip(x.split(counts), frozen.split(counts), A, B, strict=True)
    torch.testing.assert_close(found, torch.cat([f + 0.5 * xs @ a.T @ b.T for xs, f, a, b in parts]))
    assert torch.autograd.gradcheck(lambda *given: ragged_lora(*given, counts, 0.5), (x, frozen, A, B))


def job(tiny: Path, *overrides: str) -> Job:
    return assemble(load_recipe(tiny / "recipe.yaml", overrides))


def drawn(split: Split, *_: object) -> Tokens:
    """Tokens of the vocabulary at random, 2 to 15 a sample, in place of the texts'; every third ends with eos, which
    is what the decoders pad with."""
    draw = torch.Generator().manual_seed(len(split))
    tokens = tokens_of(torch.randint(2, 16, (len(split),), generator=draw).tolist())
    ids = torch.randint(3, 24, tokens.input_ids.shape, dtype=torch.int32, generator=draw)
    ids[tokens.offsets[3::3] - 1] = 2
    return replace(tokens, input_ids=ids, targets=torch.from_numpy(split.labels.copy()))


EXPECTED = {
    "bert": PackedFormat(False, 0), "roberta": PackedFormat(False, 2), "distilbert": PackedFormat(False, 0),
    "gpt2": PackedFormat(True, 0), "llama": PackedFormat(True, 0), "qwen2": PackedFormat(True, 0),
    "opt": PackedFormat(True, 0), "phi3": PackedFormat(True, 0),
}  # fmt: skip


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
OTHERS = {
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},  # its MLP has all tokens end to end
    "phi3": {**SMALL, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("layout", [{"equal": False}, {"equal": True}, {"flat": True}], ids=str)
@pytest.mark.parametrize(
    ("family", "targets"),
    [*itertools.product(FAMILIES, ["[query, value]", "all-linear"]), ("opt", "mlp"), ("phi3", "all-linear")],
)
@pytest.mark.slow
def test_packed_rows_give_the_gradients_of_padded_ones(
    tiny: Path, tmp_path: Path, family: str, targets: str, layout: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout and clients of unequal batches, in passes of all clients and of one; full gradients too."""
    # Qwen's tokenizer knows no word of the tiny vocabulary.
    monkeypatch.setattr("fedllm.tasks.sequence_classification.tokenize", drawn)
    name = save_tiny(tmp_path / family, family, **OTHERS.get(family, {}))
    settings = (f"model.name={name}", f"lora.targets={targets}")
    padded, packed = job(tiny, *settings, "run.slices=1").problem, job(tiny, *settings).problem
    assert isinstance(packed.rows, PackedRows)
    assert (padded.packed, packed.rows.format) == (False, EXPECTED[family])
    packed.rows = replace(packed.rows, **layout)
    draw = torch.Generator().manual_seed(0)
    X = padded.initial() + 0.05 * torch.randn(4, padded.dim, generator=draw)
    clients = [0, 2, 3, 7]
    assert len({len(packed.batches.indices(client, 1, 0)) for client in clients}) > 1
    losses, gradients = padded.loss_and_gradient(X, clients, 1, 0)
    full = padded.full_gradient(X[0], clients)
    for problem, tokens in ((padded, 1), (packed, 1), (packed, 100_000)):
        problem.passes.tokens = tokens
        found = problem.loss_and_gradient(X, clients, 1, 0)
        torch.testing.assert_close(found[0], losses)
        torch.testing.assert_close(found[1], gradients, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(problem.full_gradient(X[0], clients), full, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_packed_rows_in_bfloat16_are_close_to_float32(
    tiny: Path, dora: bool, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU clients may differ in rows there too."""
    monkeypatch.setattr("fedllm.tasks.sequence_classification.tokenize", drawn)
    settings = ("lora.targets=all-linear", f"lora.dora={str(dora).lower()}", "lora.dropout=0")
    exact, low = (job(tiny, *settings, f"run.precision={each}").problem for each in ("float32", "bfloat16"))
    assert isinstance(low.rows, PackedRows)
    assert isinstance(exact.rows, PackedRows)
    assert (low.rows.flat, exact.rows.flat) == (False, False)
    low.rows = replace(low.rows, flat=flat)
    assert not low.rows.equal
    clients = [0, 2, 3, 7]
    samples = np.full((4, 16), -1)
    for row, client in zip(samples, clients, strict=True):
        batch = low.batches.indices(client, 1, 0)
        row[: len(batch)] = batch
    assert not pack(low.rows.tokens, samples, low.rows.format).equal
    draw = torch.Generator().manual_seed(0)
    X = exact.initial() + 0.05 * torch.randn(4, exact.dim, generator=draw)
    (losses, gradients), found = (problem.loss_and_gradient(X, clients, 1, 0) for problem in (exact, low))
    torch.testing.assert_close(found[0], losses, rtol=0.02, atol=0.02)
    apart = (found[1] - gradients).norm(dim=1) / gradients.norm(dim=1)
    assert 0 < float(apart.max()) < 0.05


@pytest.mark.parametrize("layout", [{"equal": False}, {"equal": True}, {"flat": True}], ids=str)
def test_a_client_that_diverged_spoils_no_other(tiny: Path, layout: dict[str, bool]) -> None:
    problem = job(tiny).problem
    assert isinstance(problem.rows, PackedRows)
    problem.rows = replace(problem.rows, **layout)
    X = problem.initial().repeat(3, 1)
    fine = problem.gradient(X, [0, 3, 5], 1, 0)
    X[1] = torch.inf
    spoilt = problem.gradient(X, [0, 3, 5], 1, 0)
    assert not torch.isfinite(spoilt[1]).all()
    torch.testing.assert_close(spoilt[[0, 2]], fine[[0, 2]])


class _Mixing(nn.Module):
    """Reads neither position ids nor masks of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.words(input_ids).cumsum(dim=1)


def test_a_model_that_mixes_samples_is_given_a_row_each() -> None:
    model, tokens = _Mixing(), tokens_of([4, 5, 6])

    def padded(index: torch.Tensor) -> torch.Tensor:
        return model(tokens.rows(index)["input_ids"])[:, 0]

    def packed(rows: Packed) -> torch.Tensor:
        return model(rows.inputs["input_ids"]).flatten(0, 1)[rows.reads]

    with torch.no_grad():
        assert find_format(model, tokens, padded, packed, tolerance=0.01) is None
        assert find_format(model, tokens_of([4]), padded, packed, tolerance=0.01) is None


def test_a_model_that_cannot_take_packed_rows_trains_all_the_same(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: object, *given: object) -> None:
        raise TypeError("unexpected keyword argument 'position_ids'")

    padded = job(tiny, "run.slices=1").problem
    monkeypatch.setattr("fedllm.problems.lora.stacked_model.StackedModel.packed", refuses)
    problem = job(tiny).problem
    assert not problem.packed
    X = problem.initial().repeat(2, 1)
    torch.testing.assert_close(
        problem.gradient(X, [0, 3], 1, 0), padded.gradient(X, [0, 3], 1, 0), rtol=1e-4, atol=1e-6
    )

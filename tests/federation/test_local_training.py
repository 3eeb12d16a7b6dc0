"""What a GPU would see of the local loop: no host read, no work that grows with the number of parameters.

The meta device stands for a GPU: it knows shapes and no values, so that reading one (`.item()`, `bool(...)`, `.cpu()`,
a mask as an index) raises, as does an operation on tensors of two devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, save_tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedllm import QuadraticProblem, load_algorithm
from fedllm import blocks as fedllm_blocks
from fedllm.algorithms import Algorithm, algorithm_names
from fedllm.blocks import BlockPartition
from fedllm.blocks.layout import whole
from fedllm.data.client_batches import ClientBatches
from fedllm.data.tokenization import Tokens, send
from fedllm.federation.client_states import ClientStore
from fedllm.federation.info import round_info
from fedllm.federation.local_training import train_together
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.problems.lora.attention import NAME
from fedllm.problems.lora.engine_settings import EngineSettings
from fedllm.problems.lora.packed_rows import PackedRows
from fedllm.problems.lora.padded_rows import SLICE_OVERHEAD, PaddedRows
from fedllm.problems.lora.problem import LoraProblem
from fedllm.tasks.heads import sequence_head

PARTS = [np.arange(0, 20), np.arange(20, 33), np.arange(33, 40)]


def tokens() -> Tokens:
    """Forty texts of 3 to 11 tokens with labels 0 to 2."""
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (40,), generator=rng)
    ids = torch.randint(4, 24, (int(lengths.sum()),), generator=rng, dtype=torch.int32)
    return Tokens(ids, None, torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]), torch.arange(40) % 3)


def lora_problem(
    folder: Path, family: str, autocast: torch.dtype | None = None, dropout: float = 0.1, **changes: int
) -> LoraProblem:
    save_tiny(folder, family, **changes)
    backbone = load_backbone(ModelSettings(name=str(folder), dropout=0.0 if autocast else None), sequence_head(3))
    model = attach_lora(backbone, LoraSettings(rank=2, dropout=dropout))
    batches = ClientBatches(PARTS, batch_size=8, epochs=1, steps=None, seed=0)
    blocks = fedllm_blocks.partition(model)
    pad = backbone.tokenizer.pad_token_id
    losses = partial(torch.nn.functional.cross_entropy, reduction="none")
    return LoraProblem(model, tokens(), batches, losses, EngineSettings(autocast, pad_id=pad), blocks)


def moved_to_meta(problem: LoraProblem) -> LoraProblem:
    """The problem on the meta device, in rows as a GPU has them; it is changed."""
    assert problem.blocks is not None
    assert isinstance(problem.rows, PackedRows)
    problem.rows = replace(problem.rows, equal=True, flat=False)
    problem.model.model.to("meta")
    problem.model.start = problem.model.start.to("meta")
    problem.blocks = problem.blocks.to(torch.device("meta"))
    return problem


@pytest.fixture(autouse=True)
def _meta_has_the_gpus_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLICE_OVERHEAD, "meta", SLICE_OVERHEAD["cuda"])


@pytest.fixture(scope="module")
def on_meta(tmp_path_factory: pytest.TempPathFactory) -> LoraProblem:
    problem = lora_problem(tmp_path_factory.mktemp("meta"), "bert")
    assert problem.representations.outputs == 3  # found once, on real numbers
    return moved_to_meta(problem)


def local_round(alg: Algorithm, problem: Any, counts: list[int]) -> Any:
    """begin, the local steps of a cohort, end."""
    info = round_info(alg, problem, rounds=5, sampled=len(counts), tracked=1, local_steps=max(counts))
    x = problem.initial()
    host = torch.zeros(len(counts), len(x), dtype=x.dtype)  # x and the full gradients of fresh clients
    store = ClientStore(lambda count: alg.init_clients(host, info, host if alg.needs_full_gradient() else None))
    federation = FederationState(0, x, alg.init_server(x, info, x if alg.needs_full_gradient() else None), store)
    setup = Setup(alg, problem, info)
    return train_together(setup, federation, list(range(len(counts))), counts, {0}, lambda active: None)


VARIANTS = [
    *((name, {}) for name in algorithm_names()),
    ("fedavg", {"clip_norm": 1.0, "schedule": "cosine_steps"}),
    ("fadamgc", {"tracking_init": "gradient", "local": "adamw"}),
    ("fedadamw", {"form": "alg3", "weight_decay": 0.1}),
    ("localadam", {"eps": 0.0}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda value: str(value) or "default")
def test_the_local_loop_reads_nothing_back(on_meta: LoraProblem, name: str, options: dict[str, Any]) -> None:
    """Two steps and one of a BERT with LoRA dropout, packed rows of unequal samples."""
    trained = local_round(load_algorithm(name, lr=0.01, **options), on_meta, [2, 1])
    assert trained.local["x"].device.type == "meta"
    assert (2, on_meta.dim) in [value.shape for value in trained.uploads.sent.values()]
    assert trained.losses.shape == (2,)


class Nosy(QuadraticProblem):
    """A problem that looks at a value."""

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return X if X.sum() > 0 else -X


def test_a_read_would_be_noticed() -> None:
    nosy = Nosy(torch.empty(3, 4, 4, device="meta"), torch.empty(3, 4, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        local_round(load_algorithm("fedavg", lr=0.01), nosy, [1, 1, 1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_no_family_reads_its_mask(tmp_path: Path, family: str) -> None:
    """In packed rows, in padded ones, and in the pass for full gradients."""
    problem = lora_problem(tmp_path, family)
    X = moved_to_meta(problem).initial().expand(2, -1)
    packed = problem.gradient(X, [0, 2], 0, 0)
    problem.rows = PaddedRows(problem.model, problem.rows.tokens, problem.rows.pad_id)
    padded, full = problem.gradient(X, [0, 2], 0, 0), problem.full_gradient(problem.initial(), [0, 1])
    assert {value.shape for value in (packed, padded, full)} == {(2, problem.dim)}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_sdpa_and_ours_gives_transformers_own_numbers(tmp_path: Path, family: str) -> None:
    problem = lora_problem(tmp_path, family)
    inner = problem.model.model.get_base_model()
    assert inner.config._attn_implementation == NAME
    x = problem.initial() + 0.05
    with Counted() as ours:
        logits = problem.outputs(x, tokens())
    assert any("scaled_dot_product" in name for name in ours.names)
    inner.set_attn_implementation("sdpa")
    torch.testing.assert_close(problem.outputs(x, tokens()), logits, rtol=1e-4, atol=1e-5)
    problem.release()
    assert inner.config._attn_implementation == "sdpa"
    problem.space.scatter(problem.model.model, x)
    everything = tokens().rows(torch.arange(40), pad_id=inner.config.pad_token_id)
    torch.testing.assert_close(problem.model.model(**everything).logits, logits, rtol=1e-4, atol=1e-5)


class Counted(TorchDispatchMode):
    """Names of the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Given(QuadraticProblem):
    """Gradients that cost no operation."""

    def loss_and_gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        return X[:, 0], X


def operations(alg: Algorithm, blocks: int, steps: int) -> int:
    """Operations of a local round with `steps` steps, over `blocks` parameters of ten numbers each."""
    layout = BlockPartition(tuple(whole(f"p{block}", "tensor", 10) for block in range(blocks)))
    d = layout.dim
    given = Given(torch.zeros(2, 1, 1).expand(2, d, d), torch.zeros(2, d), x0=torch.ones(d), blocks=layout)
    with Counted() as counted:
        local_round(alg, given, [steps, steps])
    return len(counted.names)


@pytest.mark.parametrize("name", algorithm_names())
def test_a_step_costs_the_same_operations_whatever_the_number_of_parameters(name: str) -> None:
    alg = load_algorithm(name, lr=0.01)
    few, many = (operations(alg, blocks, 5) - operations(alg, blocks, 4) for blocks in (2, 40))
    assert few == many
    assert few <= (80 if alg.contrastive else 40)  # the contrast is the problem's


LAYERS = {"bert": "num_hidden_layers", "gpt2": "n_layer"}
VIEWS = ("view", "expand", "slice", "select", "split", "transpose", "squeeze", "detach", "alias", "aten.t.", "empty")


@pytest.mark.parametrize("family", list(LAYERS))
@pytest.mark.slow
def test_a_layer_launches_few_operations(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward in bfloat16, LoRA on two projections, with and without dropout of its input: what a GPU's
    host has to launch, and what it would wait for in small passes."""
    monkeypatch.setattr("fedllm.problems.lora.attention._LOW", ())  # as on a GPU
    launched = {}
    for layers in (2, 3):
        for dropout in (0.0, 0.1):
            folder = tmp_path / f"{layers}{dropout}"
            problem = lora_problem(folder, family, torch.bfloat16, dropout, **{LAYERS[family]: layers})
            assert isinstance(problem.rows, PackedRows)
            problem.rows = replace(problem.rows, equal=True, flat=False)  # as on a GPU
            X = problem.initial().expand(2, -1).clone()
            with Counted() as counted:
                problem.loss_and_gradient(X, [0, 1], 0, 0)
            launched[layers, dropout] = sum(not any(part in name for part in VIEWS) for name in counted.names)
    plain, dropping = (launched[3, dropout] - launched[2, dropout] for dropout in (0.0, 0.1))
    assert plain <= 90
    assert dropping - plain <= 2 * 12


class Spy:
    """Stands for a host tensor and notes how it leaves."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def pin_memory(self) -> Spy:
        self.calls.append(("pin", None))
        return self

    def to(self, device: torch.device, non_blocking: bool) -> Spy:
        self.calls.append((device.type, non_blocking))
        return self


@pytest.mark.parametrize(("device", "expected"), [("cuda", [("pin", None), ("cuda", True)]), ("cpu", [("cpu", True)])])
def test_a_gpu_is_fed_from_pinned_memory(device: str, expected: list[tuple[str, Any]]) -> None:
    spy = Spy()
    send(spy, torch.device(device))  # type: ignore[arg-type]
    assert spy.calls == expected


def test_sending_changes_nothing_on_the_cpu() -> None:
    value = torch.arange(3)
    assert send(value, torch.device("cpu")) is value

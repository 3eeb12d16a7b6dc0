"""A model whose computation for several clients at once is not that for each alone is found out before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny

from fedllm.batches import ClientBatches
from fedllm.errors import UserError
from fedllm.lora import attach_lora
from fedllm.lora_problem import LoraProblem
from fedllm.models import load_backbone
from fedllm.recipe import Lora, Model
from fedllm.tokens import Tokens

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
LENGTHS = [4, 30, 25, 4, 4, 28, 4, 5, 22, 4, 4, 4]


def adapted(folder: Path, family: str, rate: float | None = None, **changes: Any) -> Any:
    name = save_tiny(folder, family, **SMALL | changes)
    backbone = load_backbone(Model(name=name, dropout=rate), num_labels=3, regression=False)
    return attach_lora(backbone, Lora(rank=2, alpha=4))


def problem_of(model: Any, **options: Any) -> LoraProblem:
    """Three clients of four samples."""
    ends = torch.tensor([0, *np.cumsum(LENGTHS)])
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 24, (int(ends[-1]),), dtype=torch.int32, generator=draw)
    tokens = Tokens(ids, None, ends, torch.arange(len(LENGTHS)) % 3)
    parts = [np.arange(client, len(LENGTHS), 3) for client in range(3)]
    batches = ClientBatches(parts, batch_size=4, epochs=1, steps=None, seed=0)
    return LoraProblem(model, tokens, batches, pad_id=1, **options)


@pytest.mark.parametrize(
    ("family", "settings", "packs"),
    [
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 20}, False),  # the mask of packed rows has no window
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 30}, True),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 50}, False),  # no row is
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 60}, True),  # longer
    ],
)
def test_packed_where_it_gives_the_plain_models_gradients(
    tmp_path: Path, family: str, settings: dict[str, Any], packs: bool
) -> None:
    model = adapted(tmp_path, family, **settings)
    problem = problem_of(model)
    assert (problem.layout is not None) == packs
    X = problem.initial() + 0.3 * torch.randn(3, problem.dim, generator=torch.Generator().manual_seed(1))
    _, gradients = problem.loss_and_gradient(X, [0, 1, 2], 0, 0)
    batches = [torch.from_numpy(problem._batches.indices(client, 0, 0)) for client in range(3)]
    tokens = problem._tokens
    problem.release()
    for row, batch in enumerate(batches):
        problem.space.scatter(model, X[row])
        model.zero_grad()
        for sample in batch[:, None]:
            loss = model(**tokens.rows(sample), labels=tokens.labels[sample]).loss / len(batch)
            loss.backward()
        torch.testing.assert_close(problem.space.gather(model, grad=True), gradients[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("longformer", {"attention_window": 8}),  # its layers have the samples in the second dimension
        ("nystromformer", {}),  # it mixes neighbouring tokens, padding too
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_that_mixes_clients_or_reads_padding_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=r"cannot be trained for several clients at once.*other logits than alone"):
        problem_of(adapted(tmp_path, family, **settings))


def test_dropout_that_is_no_layer_is_refused(tmp_path: Path) -> None:
    settings = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1}
    with pytest.raises(UserError, match=r"OPTForSequence.* at a rate of 0\.1 with torch.*set model\.dropout=0"):
        problem_of(adapted(tmp_path / "own", "opt", **settings))
    assert problem_of(adapted(tmp_path / "none", "opt", rate=0.0, **settings)).layout is not None


def test_a_model_that_cannot_compute_is_refused(tmp_path: Path) -> None:
    model = adapted(tmp_path, "xmod", languages=["en_XX"])
    with pytest.raises(UserError, match=r"XmodForSequenceClassification cannot compute a sample.*language unknown"):
        problem_of(model)
    torch.nn.init.constant_(model.get_base_model().roberta.embeddings.word_embeddings.weight, torch.nan)
    model.get_base_model().roberta.set_default_language("en_XX")
    with pytest.raises(UserError, match="logits that are not finite"):
        problem_of(model)


def test_trying_leaves_the_start_as_it_was(tmp_path: Path) -> None:
    model = adapted(tmp_path, "bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    problem_of(model).release()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

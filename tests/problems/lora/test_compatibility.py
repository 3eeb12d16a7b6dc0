"""A model whose computation for several clients at once is not that for each alone is found out before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lora_problems import adapted, problem_of
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from fedllm.common.errors import UserError

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip


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
    model = adapted(tmp_path, family, **SMALL | settings)
    problem = problem_of(model)
    assert problem.packed == packs
    X = problem.initial() + 0.3 * torch.randn(3, problem.dim, generator=torch.Generator().manual_seed(1))
    _, gradients = problem.loss_and_gradient(X, [0, 1, 2], 0, 0)
    batches = [torch.from_numpy(problem.batches.indices(client, 0, 0)) for client in range(3)]
    tokens = problem.rows.tokens
    problem.release()
    for row, batch in enumerate(batches):
        problem.space.scatter(model, X[row])
        model.zero_grad()
        for sample in batch[:, None]:
            loss = model(**tokens.rows(sample), labels=tokens.targets[sample]).loss / len(batch)
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
        problem_of(adapted(tmp_path, family, **SMALL | settings))


def test_dropout_that_is_no_layer_is_refused(tmp_path: Path) -> None:
    settings = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1}
    with pytest.raises(UserError, match=r"OPTForSequence.* at a rate of 0\.1 with torch.*set model\.dropout=0"):
        problem_of(adapted(tmp_path / "own", "opt", **SMALL | settings))
    assert problem_of(adapted(tmp_path / "none", "opt", rate=0.0, **SMALL | settings)).packed


def test_a_model_that_cannot_compute_is_refused(tmp_path: Path) -> None:
    model = adapted(tmp_path, "xmod", languages=["en_XX"], **SMALL)
    with pytest.raises(UserError, match=r"XmodForSequenceClassification cannot compute a sample.*language unknown"):
        problem_of(model)
    torch.nn.init.constant_(model.get_base_model().roberta.embeddings.word_embeddings.weight, torch.nan)
    model.get_base_model().roberta.set_default_language("en_XX")
    with pytest.raises(UserError, match="logits that are not finite"):
        problem_of(model)


def test_trying_leaves_the_start_as_it_was(tmp_path: Path) -> None:
    model = adapted(tmp_path, "bert", **SMALL)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    problem_of(model).release()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class FunctionalHead(nn.Module):
    """Computes with the weight of its layer, without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.projection.weight, self.projection.bias)


def test_a_head_that_does_not_call_its_layers_is_refused() -> None:
    """Its gradients would be those of the model's own weights, and not of the clients'."""
    config = BertConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=1)
    base = BertForSequenceClassification(config)
    base.classifier = FunctionalHead()
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    with pytest.raises(UserError, match="BertForSequenceClassification cannot be trained for several clients at once"):
        problem_of(model)

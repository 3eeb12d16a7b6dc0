"""The loss of language models beside TRL's (oracle of TASKS.md, 4.4.1)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from causal_problems import adapted_causal, causal_problem, causal_tokens
from datasets import Dataset

trl = pytest.importorskip("trl")


@pytest.mark.parametrize("loss", ["nll", "chunked_nll"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma2", "phi3"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_loss_is_that_of_trl(tmp_path: Path, family: str, loss: str) -> None:
    tokens = causal_tokens()
    problem = causal_problem(adapted_causal(family))
    samples = problem.batches.indices(1, 0, 0).tolist()
    ours, gradients = problem.loss_and_gradient(problem.initial()[None], [1], 0, 0)
    inputs = dict(tokens.rows(torch.tensor(samples), pad_id=2))
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, sample in enumerate(samples):
        begin, end = tokens.offsets[sample : sample + 2].tolist()
        marks = tokens.learned[begin:end]
        labels[row, : end - begin][marks] = tokens.input_ids[begin:end][marks].long()
    model = adapted_causal(family)
    arguments = trl.SFTConfig(
        str(tmp_path), loss_type=loss, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    rows = Dataset.from_list([{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}])
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer(tmp_path))
    theirs = trainer.compute_loss(trainer.model.eval(), {**inputs, "labels": labels})
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    theirs.backward()
    gradient = torch.cat([value.grad.reshape(-1) for value in trainer.model.parameters() if value.requires_grad])
    assert (gradients[0] - gradient).norm() < 3e-6 * gradient.norm()


def tokenizer(folder: Path) -> object:
    from tiny_models import save_tokenizer

    return save_tokenizer(folder / "tokenizer", pad=True)

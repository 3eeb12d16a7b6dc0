"""The answers of a language model to some prompts of the validation split, before and after training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedllm.common.console import stage
from fedllm.common.files import replace_text
from fedllm.common.seeding import numpy_rng
from fedllm.data.pixels import Pixels
from fedllm.data.split import Split
from fedllm.data.tokenization import Tokens
from fedllm.experiment.generation import generate_answers
from fedllm.experiment.job import Job

ANSWERS = "samples.jsonl"


@dataclass(frozen=True)
class Prompt:
    """A sample up to its last response. ids: its tokens. reference: the tokens of the response, with its eos."""

    sample: int
    ids: list[int]
    reference: list[int]


def last_prompts(tokens: Tokens, samples: Sequence[int]) -> list[Prompt]:
    """The prompts of some samples: all tokens before the last run of learned tokens."""
    assert tokens.learned is not None
    found = []
    for sample in samples:
        begin, end = tokens.offsets[sample : sample + 2].tolist()
        ids, learned = tokens.input_ids[begin:end].tolist(), tokens.learned[begin:end].tolist()
        stop = len(ids) - learned[::-1].index(True)
        start = stop
        while learned[start - 1]:
            start -= 1
        found.append(Prompt(sample, ids[:start], ids[start:stop]))
    return found


def write_answers(job: Job, x: Tensor, folder: Path) -> None:
    """Writes samples.jsonl: sample, prompt (the last question), reference, before and after.

    These are `eval.samples` validation samples, drawn from (seed, 'answers'). Greedy decoding, by the model at the
    start and at x [d]. For a model that was released (see StackedModel). It has the values of x afterwards.
    """
    settings, tokenizer, samples = job.recipe.eval, job.backbone.tokenizer, job.validation
    if not settings.samples or tokenizer is None or isinstance(samples, Pixels) or samples.learned is None:
        return
    count = min(settings.samples, len(samples))
    drawn = numpy_rng(job.recipe.run.seed, "answers").choice(len(samples), count, replace=False)
    prompts = last_prompts(samples, sorted(drawn.tolist()))
    given: dict[str, list[str]] = {}
    lower = job.machine.autocast is not None
    with stage("answering prompts"), torch.autocast(x.device.type, job.machine.autocast, lower):
        for when, values in (("before", job.problem.initial()), ("after", x)):
            job.problem.space.scatter(job.model, values)
            given[when] = generate_answers(
                job.model, tokenizer, [prompt.ids for prompt in prompts], settings.new_tokens
            )
    lines = [
        _line(tokenizer, job.dataset.validation, prompt, before, after)
        for prompt, before, after in zip(prompts, given["before"], given["after"], strict=True)
    ]
    replace_text(folder / ANSWERS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _line(tokenizer: Any, split: Split, prompt: Prompt, before: str, after: str) -> dict[str, Any]:
    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()

    assert split.conversations is not None, "a language model learns conversations"
    conversation = split.conversations[prompt.sample]
    return {
        "sample": prompt.sample,
        "prompt": text(prompt.ids) if conversation.is_text else conversation.messages[-2].whole,
        "reference": text(prompt.reference),
        "before": before.strip(),
        "after": after.strip(),
    }

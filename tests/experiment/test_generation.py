"""Generated answers: greedy, the same in a batch as alone, ended by an end-of-text token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_checkpoints import FAMILIES, save_causal
from tiny_models import WORDS

from fedllm.experiment import generation
from fedllm.experiment.generation import generate_answers, room_for, stop_ids, stream_answer
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora, trainable_names
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.tasks.heads import language_head

PROMPTS = [[5, 6, 7], [9], [4, 8, 12, 16, 20, 21], [11, 5], [6, 6, 6, 6]]


def trained(folder: Path, family: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """A model with a random adapter, and its tokenizer."""
    backbone = load_backbone(ModelSettings(name=save_causal(folder, family, **changes)), language_head())
    model = attach_lora(backbone, LoraSettings(rank=2, targets=["output"]))
    rng = torch.Generator().manual_seed(1)
    for name in trainable_names(model):
        value = model.get_parameter(name)
        value.data.copy_(torch.randn(value.shape, generator=rng) * 0.3)
    return model, backbone.tokenizer


@torch.no_grad()
def by_hand(model: Any, prompt: list[int], new_tokens: int, end: int) -> list[int]:
    """Greedy decoding without a cache, padding or a batch."""
    ids = list(prompt)
    for _ in range(new_tokens):
        index = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if index == end:
            break
        ids.append(index)
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_answers_are_those_of_a_plain_loop(tmp_path: Path, family: str) -> None:
    """The checkpoint's penalty of repetitions plays no part."""
    model, tokenizer = trained(tmp_path, family)
    expected = [by_hand(model, prompt, 12, tokenizer.eos_token_id) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in expected}) > 1
    words = [tokenizer.decode(answer, skip_special_tokens=True) for answer in expected]
    assert generate_answers(model, tokenizer, PROMPTS, 12) == words
    assert [generate_answers(model, tokenizer, [prompt], 12)[0] for prompt in PROMPTS] == words
    assert base_settings(model).repetition_penalty == 1.3


def base_settings(model: Any) -> Any:
    return model.get_base_model().generation_config


def test_batches_and_an_empty_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = trained(tmp_path)
    expected = generate_answers(model, tokenizer, PROMPTS, 6)
    monkeypatch.setattr(generation, "_BATCH_TOKENS", 20)
    assert [batch for batch, _ in generation._batches(PROMPTS, 6, 64)] == [[1, 3], [0, 4], [2]]
    assert generate_answers(model, tokenizer, PROMPTS, 6) == expected
    assert generate_answers(model, tokenizer, [], 6) == []


def always(model: Any, index: int) -> None:
    """Makes one token the likeliest everywhere."""
    head = model.get_base_model().lm_head
    head.weight.data.zero_()
    head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(index), 32).float(), requires_grad=False)


def test_an_answer_ends_at_eos_and_at_ends_of_turn(tmp_path: Path) -> None:
    model, tokenizer = trained(tmp_path, tie_word_embeddings=False)
    assert stop_ids(model, tokenizer) == [2]
    always(model, 2)
    assert generate_answers(model, tokenizer, PROMPTS, 5) == [""] * 5
    always(model, 7)
    assert generate_answers(model, tokenizer, PROMPTS[:1], 5) == [" ".join([WORDS[3]] * 5)]
    base_settings(model).eos_token_id = [2, 7]
    assert stop_ids(model, tokenizer) == [2, 7]
    assert generate_answers(model, tokenizer, PROMPTS, 5) == [""] * 5


def test_no_more_tokens_than_positions(tmp_path: Path) -> None:
    """GPT-2 has a table of 64 positions. The short prompt's answer is as long as without the long ones beside it."""
    model, tokenizer = trained(tmp_path, "gpt2", tie_word_embeddings=False)
    always(model, 7)
    answers = generate_answers(model, tokenizer, [[5] * 60, [5] * 64, [5] * 3], 10)
    assert [len(answer.split()) for answer in answers] == [4, 0, 10]
    assert [room_for(model, length, 10) for length in (3, 60, 64, 99)] == [10, 4, 0, 0]


def test_a_streamed_answer_comes_in_pieces_and_is_the_same(tmp_path: Path) -> None:
    model, tokenizer = trained(tmp_path)
    pieces: list[str] = []
    answer = stream_answer(model, tokenizer, PROMPTS[0], 12, pieces.append)
    assert answer == generate_answers(model, tokenizer, PROMPTS[:1], 12)[0]
    assert "".join(pieces) == answer
    assert len(pieces) > 1
    torch.manual_seed(3)
    drawn = [stream_answer(model, tokenizer, PROMPTS[0], 12, pieces.append, temperature=5.0) for _ in range(3)]
    assert len({*drawn, answer}) == 4
    torch.manual_seed(3)
    assert stream_answer(model, tokenizer, PROMPTS[0], 12, pieces.append, temperature=5.0) == drawn[0]

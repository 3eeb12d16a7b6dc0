"""Answers of a causal language model, generated token by token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from fedllm.models.lora import base_model

_BATCH_TOKENS = 4096  # of a batch of prompts, with padding and answers


@torch.no_grad()
def generate_answers(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts_ids: Sequence[Sequence[int]], new_tokens: int
) -> list[str]:
    """The greedy answer to each of n prompts, without special tokens: the likeliest token each time.

    model: a causal language model, or a PEFT model of one, in eval mode. prompts_ids: the ids of each prompt, with all
    that the model is to see of it. An answer ends before an end-of-text token (`stop_ids`), after `new_tokens` tokens,
    or where the model has no positions left; a prompt that fills them all has the answer "". Settings of the
    checkpoint's generation_config, such as a penalty of repetitions, do not apply.
    """
    answers = [""] * len(prompts_ids)
    for batch, room in _batches(prompts_ids, new_tokens, _positions(model)):
        found = _generate(model, tokenizer, [prompts_ids[place] for place in batch], room)
        for place, ids in zip(batch, found, strict=True):
            answers[place] = str(tokenizer.decode(ids, skip_special_tokens=True))
    return answers


@torch.no_grad()
def stream_answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    new_tokens: int,
    write: Callable[[str], None],
    temperature: float = 0.0,
) -> str:
    """The answer to one prompt, which `write` gets piece by piece while it comes; see generate_answers.

    temperature: 0 for the likeliest token each time; else tokens are drawn with the model's probabilities to the power
    1 / temperature, from torch's global random state.
    """
    ((_, room),) = _batches([prompt_ids], new_tokens, _positions(model))
    (ids,) = _generate(model, tokenizer, [prompt_ids], room, temperature, _Pieces(tokenizer, write))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end an answer: the tokenizer's eos token and those of the checkpoint's generation_config, which may
    name the end of a turn as well."""
    named = base_model(model).generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return sorted({int(index) for index in ids if index is not None})


def room_for(model: Any, prompt_tokens: int, new_tokens: int) -> int:
    """How many of `new_tokens` tokens the model has positions for behind a prompt."""
    positions = _positions(model)
    return new_tokens if positions is None else max(0, min(new_tokens, positions - prompt_tokens))


def _positions(model: Any) -> int | None:
    found: int | None = getattr(base_model(model).config, "max_position_embeddings", None)
    return found


def _batches(
    prompts: Sequence[Sequence[int]], new_tokens: int, positions: int | None
) -> Iterator[tuple[list[int], int]]:
    """Places of prompts of about the same length, and how many tokens may follow them.

    A prompt that leaves less room than `new_tokens` is alone, so that it does not shorten other answers.
    """
    batch: list[int] = []
    for place in sorted(range(len(prompts)), key=lambda place: len(prompts[place])):
        length = len(prompts[place])
        if positions is not None and length + new_tokens > positions:
            yield [place], max(0, positions - length)
            continue
        if batch and (len(batch) + 1) * (length + new_tokens) > _BATCH_TOKENS:
            yield batch, new_tokens
            batch = []
        batch.append(place)
    if batch:
        yield batch, new_tokens


def _generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float = 0.0,
    streamer: TextStreamer | None = None,
) -> list[list[int]]:
    """The new ids of each prompt, up to and without the one that ends the answer."""
    if new_tokens < 1:
        return [[] for _ in prompts]
    net = base_model(model)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids, mask = _left_padded(prompts, int(pad), net.device)
    ends = stop_ids(model, tokenizer)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, eos_token_id=ends or None, pad_token_id=pad, use_cache=True, **drawn
    )
    with _own_settings_only(net):
        found: Tensor = net.generate(input_ids=ids, attention_mask=mask, generation_config=settings, streamer=streamer)
    return [_until(row, ends) for row in found[:, ids.shape[1] :].tolist()]


def _left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [n, L]: new tokens are appended on the right of every row."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    stop = next((place for place, index in enumerate(ids) if index in ends), len(ids))
    return ids[:stop]


@contextlib.contextmanager
def _own_settings_only(net: Any) -> Iterator[None]:
    """transformers takes every setting that a call leaves out from the checkpoint's generation_config."""
    kept = net.generation_config
    net.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        net.generation_config = kept


class _Pieces(TextStreamer):
    """Hands on the text of one answer in whole words."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._write(text)

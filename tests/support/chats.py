"""Tokenizers with the chat templates of four families, and conversations, for tests of causal language models."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from tiny_models import local_hub
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fedllm.data.conversations.conversation import ASSISTANT, SYSTEM, USER, Conversation, Message
from fedllm.data.conversations.encoding import encode_conversations
from fedllm.data.loading import Split
from fedllm.data.settings import DataSettings
from fedllm.data.tokenization import Tokens

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TAGGED = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles!') }}"
    "{% endif %}{% endfor %}"
)
# Family: template, bos, eos, further special tokens, the token that ends a turn.
FAMILIES = {
    "chatml": (CHATML, None, "<|im_end|>", ["<|im_start|>"], "<|im_end|>"),
    "chatml_tagged": (CHATML_TAGGED, None, "<|im_end|>", ["<|im_start|>"], "<|im_end|>"),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"], "<|eot_id|>"),
    "gemma": (GEMMA, "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]"], "</s>"),
}
_TEXT = ["the cat sat on the mat", "user assistant system model", "git branch -a shows all branches\n\n", "a b c 1 2 3"]


@cache
def _bytes() -> Tokenizer:
    """A byte-level BPE of a few words: any text can be written in it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(_TEXT * 5, trainer)
    return made


def chat_tokenizer(family: str, source: str = "bytes") -> Any:
    """A tokenizer with the special tokens and the template of a family. source: bytes, or gpt2 of the local hub."""
    template, bos, eos, others, _ = FAMILIES[family]
    if source == "gpt2":
        made: Any = AutoTokenizer.from_pretrained(str(local_hub() / "models/openai-community/gpt2"))
    else:
        made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_bytes().to_str()))
    named = {"eos_token": eos, "pad_token": eos} | ({"bos_token": bos} if bos else {})
    made.add_special_tokens({**named, "additional_special_tokens": others})
    made.chat_template = template
    return made


def bare_tokenizer(eos: str | None = "</s>") -> Any:
    """A tokenizer without a chat template."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_bytes().to_str()), eos_token=eos, pad_token=eos)


def chat(*contents: str, system: str | None = None) -> Conversation:
    """Messages of user and assistant in turn."""
    first = [] if system is None else [Message(SYSTEM, system)]
    said = [Message((USER, ASSISTANT)[place % 2], content) for place, content in enumerate(contents)]
    return Conversation((*first, *said))


def split_of(*conversations: Conversation) -> Split:
    """The conversations as a split whose rows in the file are 11, 12, ..."""
    count = len(conversations)
    return Split([], np.zeros(count, np.int64), {}, np.arange(11, 11 + count), list(conversations))


def encode(tokenizer: Any, *conversations: Conversation, max_length: int = 512, **keys: Any) -> Tokens:
    """The tokens of conversations, by keys of `data:`."""
    settings = DataSettings(train="own.jsonl", task="causal_lm", max_length=max_length, **keys)
    return encode_conversations(split_of(*conversations), tokenizer, settings, max_length)


def parts_of(tokens: Tokens, sample: int, tokenizer: Any) -> list[str]:
    """The learned runs of a sample's tokens, decoded."""
    start, end = tokens.offsets[sample : sample + 2].tolist()
    ids, learned = tokens.input_ids[start:end].tolist(), tokens.learned[start:end].tolist()
    runs: list[list[int]] = [[]]
    for token, marked in zip(ids, learned, strict=True):
        if marked:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def ids_of(tokens: Tokens, sample: int) -> list[int]:
    """The ids of a sample."""
    start, end = tokens.offsets[sample : sample + 2].tolist()
    return list(tokens.input_ids[start:end].tolist())

"""Tiny random checkpoints of six architectures, saved with a word tokenizer, for tests that load a model."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from repository import REPO
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING

WORDS = [
    "the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "big", "small", "red", "blue", "not", "very",
    "and", "or", "is", "was",
]  # fmt: skip

_LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
CONFIGS = {
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": {
        "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64, "pad_token_id": 1
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 2},
    "llama": _LLAMA,
    "qwen2": _LLAMA,
}  # fmt: skip
FAMILIES = list(CONFIGS)
DECODERS = ("gpt2", "llama", "qwen2")


def save_tokenizer(folder: Path, pad: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: <s> 0, <pad> 1, </s> 2, <unk> 3, then WORDS; without a pad token unless `pad`."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | ({"pad_token": "<pad>"} if pad else {})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, model_input_names=["input_ids", "attention_mask"], **special
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_tiny(folder: Path, family: str, *, headless: bool = True, **changes: object) -> str:
    """A random checkpoint of `family` in `folder`, without a task head unless told otherwise; its path."""
    save_tokenizer(folder, pad=family not in DECODERS)
    settings = {"vocab_size": 32, "initializer_range": 0.2, **CONFIGS.get(family, {}), **changes}
    config = CONFIG_MAPPING[family](**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = (AutoModel if headless else AutoModelForSequenceClassification).from_config(config)
    model.save_pretrained(folder)
    return str(folder)


def tiny_batch(pad: int) -> dict[str, torch.Tensor]:
    """Three texts of 7, 3 and 4 tokens, padded with `pad`: input_ids and attention_mask [3, 7]."""
    texts = [[5, 12, 6, 9, 10, 4, 11], [5, 7, 8], [16, 17, 13, 30]]
    ids = [text + [pad] * (7 - len(text)) for text in texts]
    mask = [[1] * len(text) + [0] * (7 - len(text)) for text in texts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def local_hub() -> Path | None:
    """The local hub of FEDLLM_LOCAL_HUB, else the one beside the repository, else None."""
    beside = REPO.parent / "shared" / "hub"
    hub = Path(os.environ.get("FEDLLM_LOCAL_HUB") or beside)
    return hub if hub.is_dir() else None

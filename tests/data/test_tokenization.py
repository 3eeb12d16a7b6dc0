from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fedllm.common.errors import UserError
from fedllm.data.loading import Split
from fedllm.data.tokenization import tokenize

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefghij"]
PAD, CLS, SEP, UNK = range(4)


def bert():
    """Words to ids, with [CLS] a [SEP] b [SEP] and token types as BERT has them."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


def gpt2(eos="<|endoftext|>"):
    """Bytes to ids without special tokens around a text, as GPT-2 has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def split(*columns, labels=None):
    labels = np.arange(len(columns[0])) if labels is None else labels
    return Split([list(column) for column in columns], np.array(labels), {})


def ids(*words):
    return [WORDS.index(word) for word in words]


def examples(tokens):
    bounds = tokens.offsets.tolist()
    return [tokens.input_ids[a:b].tolist() for a, b in pairwise(bounds)]


def test_single_texts():
    tokens = tokenize(split(["a b", "", "c d e f g h"]), bert(), max_length=6)
    assert examples(tokens) == [[CLS, *ids("a", "b"), SEP], [CLS, SEP], [CLS, *ids("c", "d", "e", "f"), SEP]]
    assert tokens.lengths.tolist() == [4, 2, 6]
    assert tokens.token_type_ids is None  # all zero
    assert (tokens.input_ids.dtype, tokens.offsets.dtype) == (torch.int32, torch.int64)
    assert tokens.targets.tolist() == [0, 1, 2]
    assert len(tokens) == 3


def test_pairs_are_cut_at_the_longer_text():
    tokens = tokenize(split(["a b c d e", "a"], ["f", "b c d e f"]), bert(), max_length=7)
    assert examples(tokens) == [
        [CLS, *ids("a", "b", "c"), SEP, *ids("f"), SEP],
        [CLS, *ids("a"), SEP, *ids("b", "c", "d"), SEP],
    ]
    assert tokens.token_type_ids.dtype == torch.uint8
    assert tokens.token_type_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]


def test_a_tokenizer_without_separators_gets_one():
    tokenizer = gpt2()
    eos = tokenizer.eos_token_id
    tokens = tokenize(split(["ab", "abcdefgh", "", "ab"], ["cd", "ij", "cd", ""]), tokenizer, max_length=6)
    text = lambda part: tokenizer(part)["input_ids"]  # noqa: E731
    assert examples(tokens) == [
        [*text("ab"), eos, *text("cd")],
        [*text("abc"), eos, *text("ij")],
        [eos, *text("cd")],
        [*text("ab"), eos],
    ]


def test_an_empty_text_is_one_token():
    tokenizer = gpt2()
    assert examples(tokenize(split(["", "a"]), tokenizer, 8)) == [[tokenizer.eos_token_id], tokenizer("a")["input_ids"]]


def test_what_cannot_be_tokenized_is_named():
    with pytest.raises(UserError, match=r"data\.max_length=3"):
        tokenize(split(["a"]), bert(), max_length=3)
    with pytest.raises(UserError, match="eos_token"):
        tokenize(split(["a"], ["b"]), gpt2(eos=None), max_length=8)


def test_batches_do_not_change_the_result(monkeypatch):
    data = split([" ".join("abcdefghij"[: i % 11]) for i in range(25)], labels=np.linspace(0, 1, 25, dtype=np.float32))
    whole = tokenize(data, bert(), 8)
    told = []
    monkeypatch.setattr("fedllm.data.tokenization.BATCH", 10)
    parts = tokenize(data, bert(), 8, progress=lambda *step: told.append(step))
    assert torch.equal(whole.input_ids, parts.input_ids)
    assert torch.equal(whole.offsets, parts.offsets)
    assert whole.targets.dtype == torch.float32
    assert told == [("tokenizing", done, 25) for done in (10, 20, 25)]


def test_rows_are_padded_to_the_longest():
    tokens = tokenize(split(["a", "b c d", "e f"], ["g", "h", "i"]), bert(), max_length=16)
    batch = tokens.rows(torch.tensor([2, 0]), pad_id=9)
    assert batch["input_ids"].tolist() == [
        [CLS, *ids("e", "f"), SEP, *ids("i"), SEP],
        [CLS, *ids("a"), SEP, *ids("g"), SEP, 9],
    ]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1] * 5 + [0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]]
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_rows_of_a_given_length():
    tokens = tokenize(split(["a", "b c d"]), bert(), max_length=16)
    batch = tokens.rows(torch.tensor([0, 1, 1]), length=4)
    assert batch["input_ids"].tolist() == [[CLS, *ids("a"), SEP, PAD]] + [[CLS, *ids("b", "c", "d")]] * 2
    assert "token_type_ids" not in batch
    assert tokens.rows(torch.tensor([1]), length=7)["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    assert tokens.rows(torch.tensor([], dtype=torch.int64))["input_ids"].shape == (0, 0)


def test_to_moves_everything():
    tokens = tokenize(split(["a"], ["b"]), bert(), max_length=8).to("meta")
    moved = [value for value in vars(tokens).values() if isinstance(value, torch.Tensor)]
    assert len(moved) >= 3
    assert {value.device.type for value in moved} == {"meta"}

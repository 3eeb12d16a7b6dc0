"""Conversations with more tokens than data.max_length: three rules, and what is said of them."""

from __future__ import annotations

import pytest
import torch
from chats import bare_tokenizer, chat, chat_tokenizer, encode, ids_of, parts_of

from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import TEXT, Conversation, Message

SHORT = chat("one?", "two")
LONG = chat("word " * 40 + "END", "the answer")


def length_of(tokenizer, conversation: Conversation, **keys: object) -> int:
    return len(encode(tokenizer, conversation, **keys).input_ids)


def test_drop_leaves_out_and_counts() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokens = encode(tokenizer, LONG, SHORT, LONG, max_length=40, too_long="drop", system="s")
    assert tokens.lengths.tolist()[::2] == [0, 0]
    assert tokens.sizes.tolist()[::2] == [0, 0]
    assert tokens.notes == ("2 of 3 samples are longer than 40 tokens: 2 were left out (data.too_long)",)
    kept = tokens.take(tokens.sizes.nonzero()[:, 0])
    assert len(kept) == 1
    assert ids_of(kept, 0) == ids_of(tokens, 1) == ids_of(encode(tokenizer, SHORT, system="s"), 0)
    assert kept.learned.tolist() == encode(tokenizer, SHORT, system="s").learned.tolist()


def test_take_reorders() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokens = encode(tokenizer, SHORT, LONG, chat("a", "b"))
    taken = tokens.take(torch.tensor([2, 0]))
    assert [ids_of(taken, 0), ids_of(taken, 1)] == [ids_of(tokens, 2), ids_of(tokens, 0)]
    assert taken.sizes.tolist() == tokens.sizes[[2, 0]].tolist()


def test_cut_prompt_cuts_the_beginning_and_keeps_template_and_answer() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokens = encode(tokenizer, LONG, max_length=60)
    text = tokenizer.decode(ids_of(tokens, 0))
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("END<|im_end|>\n<|im_start|>assistant\nthe answer<|im_end|>")
    assert 55 < len(tokens.input_ids) <= 60, "no more is cut than needed"
    assert parts_of(tokens, 0, tokenizer) == ["the answer<|im_end|>"]
    assert tokens.notes == (
        "1 of 1 samples are longer than 60 tokens: the beginning of the prompt was cut in 1, 0 were left out "
        "(data.too_long)",
    )


def test_cut_prompt_leaves_out_the_earliest_exchanges_first() -> None:
    tokenizer = chat_tokenizer("chatml")
    talk = chat("first " * 10, "x", "second", "y", "third", "z", system="s")
    limit = length_of(tokenizer, chat("second", "y", "third", "z", system="s"))
    tokens = encode(tokenizer, talk, max_length=limit)
    assert ids_of(tokens, 0) == ids_of(encode(tokenizer, chat("second", "y", "third", "z", system="s")), 0)
    assert parts_of(tokens, 0, tokenizer) == ["y<|im_end|>", "z<|im_end|>"]


def test_cut_prompt_cuts_the_input_before_the_instruction() -> None:
    tokenizer = bare_tokenizer()
    about = Conversation((Message("user", "Sum up.", "word " * 60 + "END"), Message("assistant", "Short.")))
    limit = length_of(tokenizer, about, template="alpaca") - 40
    text = tokenizer.decode(ids_of(encode(tokenizer, about, max_length=limit, template="alpaca"), 0))
    assert "### Instruction:\nSum up.\n\n### Input:\n" in text
    assert "END\n\n### Response: Short.</s>" in text


def test_an_answer_that_does_not_fit_is_left_out_by_cut_prompt() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokens = encode(tokenizer, SHORT, chat("q?", "long " * 50), max_length=60)
    assert tokens.sizes.tolist()[1] == 0
    assert "the beginning of the prompt was cut in 0, 1 were left out" in tokens.notes[0]


def test_cut_response_keeps_the_beginning_without_an_eos() -> None:
    tokenizer = chat_tokenizer("chatml")
    whole = encode(tokenizer, chat("q?", "long " * 50))
    cut = encode(tokenizer, chat("q?", "long " * 50), LONG, max_length=60, too_long="cut_response")
    assert ids_of(cut, 0) == ids_of(whole, 0)[:60]
    assert ids_of(cut, 0)[-1] != tokenizer.eos_token_id
    assert cut.sizes.tolist()[1] == 0, "a sample of which only the prompt is left has nothing to learn"
    assert cut.notes == (
        "2 of 2 samples are longer than 60 tokens: the end was cut in 1, 1 were left out (data.too_long)",
    )


def test_a_plain_text_is_cut_at_its_end() -> None:
    tokenizer = bare_tokenizer()
    text = Conversation((Message(TEXT, "the cat sat on the mat " * 9),))
    tokens = encode(tokenizer, text, max_length=10)
    assert ids_of(tokens, 0) == ids_of(encode(tokenizer, text), 0)[:10]
    assert "the end was cut in 1" in tokens.notes[0]


@pytest.mark.parametrize("rule", ["drop", "cut_prompt", "cut_response"])
def test_no_sample_is_ever_without_a_learned_token(rule: str) -> None:
    tokenizer = chat_tokenizer("llama3")
    talks = [SHORT, LONG, chat("q " * 30, "a " * 30), chat("a", "b" * 90, "c" * 90, "d"), chat("x", "y" * 30)]
    for length in range(length_of(tokenizer, SHORT), 120, 9):
        tokens = encode(tokenizer, *talks, SHORT, max_length=length, too_long=rule)
        assert (tokens.lengths <= length).all()
        assert ((tokens.sizes > 0) == (tokens.lengths > 0)).all()
        assert not tokens.learned[tokens.offsets[:-1][tokens.lengths > 0]].any()


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"data.max_length=12: with too_long drop, none of 2 samples has a learned token"
    ):
        encode(chat_tokenizer("chatml"), LONG, LONG, max_length=12, too_long="drop")
    with pytest.raises(UserError, match=r"data.max_length=1: expected at least 2"):
        encode(chat_tokenizer("chatml"), LONG, max_length=1)

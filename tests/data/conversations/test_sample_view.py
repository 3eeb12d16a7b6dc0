"""One sample as the model sees it, with the learned part marked."""

from __future__ import annotations

from chats import bare_tokenizer, chat, chat_tokenizer, encode

from fedllm.data.conversations.sample_view import learned_share, marked_text


def test_the_learned_parts_stand_between_marks() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokens = encode(tokenizer, chat("skip", "x"), chat("one?", "two", "three?", "four"), system="Count.")
    assert marked_text(tokens, 1, tokenizer) == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n⟦two<|im_end|>⟧\n"
        "<|im_start|>user\nthree?<|im_end|>\n<|im_start|>assistant\n⟦four<|im_end|>⟧"
    )


def test_control_codes_are_shown_and_not_obeyed() -> None:
    tokenizer = bare_tokenizer()
    tokens = encode(tokenizer, chat("a\x1b[31m\r", " é\x07"), template="none")
    assert marked_text(tokens, 0, tokenizer) == "a\\x1b[31m\\r⟦ é\\x07</s>⟧"


def test_the_share_that_is_learned() -> None:
    tokenizer = bare_tokenizer()
    tokens = encode(tokenizer, chat("!!!", "#"), template="none")
    assert learned_share(tokens) == "2 of 5 tokens are learned (40%)"

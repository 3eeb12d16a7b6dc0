"""What is learned of a conversation: its responses and their ends, by position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chats import CHATML, FAMILIES, bare_tokenizer, chat, chat_tokenizer, encode, ids_of, parts_of
from tiny_models import local_hub
from tokenizers.processors import TemplateProcessing

from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import TEXT, Conversation, Message

THREE = chat("one?", "The cat.", "two\n\nand more?", "a b  c", "three?", "1 2 3\n\n4")
ANSWERS = ["The cat.", "a b  c", "1 2 3\n\n4"]
GPT2 = (local_hub() or Path("none")) / "models/openai-community/gpt2/tokenizer.json"
SOURCES = ["bytes", pytest.param("gpt2", marks=pytest.mark.skipif(not GPT2.is_file(), reason="no GPT-2 in a hub"))]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_the_learned_tokens_are_the_answers_and_their_ends(family: str, source: str) -> None:
    tokenizer, end = chat_tokenizer(family, source), FAMILIES[family][4]
    tokens = encode(tokenizer, THREE)
    lead = " " if family == "mistral" else ""
    assert parts_of(tokens, 0, tokenizer) == [f"{lead}{answer}{end}" for answer in ANSWERS]
    assert ids_of(tokens, 0)[-1] == tokenizer.convert_tokens_to_ids(end), "nothing comes after the last answer's end"
    whole = tokenizer.apply_chat_template(
        [{"role": each.role, "content": each.content} for each in THREE.messages], tokenize=False
    )
    assert tokenizer.decode(ids_of(tokens, 0)) == whole.rstrip("\n")


@pytest.mark.parametrize("source", SOURCES)
def test_the_mask_is_that_of_generation_tags(source: str) -> None:
    tokenizer = chat_tokenizer("chatml_tagged", source)
    tokens = encode(tokenizer, THREE)
    theirs = tokenizer.apply_chat_template(
        [{"role": each.role, "content": each.content} for each in THREE.messages],
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    count = len(tokens.input_ids)
    assert ids_of(tokens, 0) == theirs["input_ids"][:count]
    assert [int(each) for each in tokens.learned] == theirs["assistant_masks"][:count]
    assert sum(theirs["assistant_masks"]) == int(tokens.sizes[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_has_the_tokens_that_the_model_is_asked_with(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    tokens = encode(tokenizer, chat("what?", "\nindented"), learn="last")
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "what?"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert ids_of(tokens, 0)[: len(asked)] == asked
    assert not tokens.learned[: len(asked)].any()
    assert tokens.learned[len(asked) :].all()


def test_the_last_answer_and_all_tokens() -> None:
    tokenizer = chat_tokenizer("chatml")
    assert parts_of(encode(tokenizer, THREE, learn="last"), 0, tokenizer) == [f"{ANSWERS[-1]}<|im_end|>"]
    every = encode(tokenizer, THREE, learn="all")
    assert every.learned.tolist() == [False] + [True] * (len(every.learned) - 1)


def test_every_sample_ends_in_a_learned_end_of_turn_whatever_pads() -> None:
    """Oracle 10: tokens are marked by position, so another pad token changes nothing."""
    conversations = [chat("a?", f"answer {number}") for number in range(5)]
    tokens = []
    for pad in ("<|im_end|>", "<|im_start|>"):
        tokenizer = chat_tokenizer("chatml")
        tokenizer.pad_token = pad
        tokens.append(encode(tokenizer, *conversations))
    last = tokens[0].offsets[1:] - 1
    assert (tokens[0].input_ids[last] == chat_tokenizer("chatml").eos_token_id).all()
    assert tokens[0].learned[last].all()
    for name in ("input_ids", "learned", "offsets"):
        assert torch.equal(getattr(tokens[0], name), getattr(tokens[1], name))


def test_a_plain_prompt_gives_its_last_blanks_to_the_response() -> None:
    tokenizer = bare_tokenizer()
    tokens = encode(tokenizer, chat("the cat sat on ", "the mat"), template="none")
    assert parts_of(tokens, 0, tokenizer) == [" the mat</s>"]
    prompt = tokenizer("the cat sat on", add_special_tokens=False)["input_ids"]
    assert ids_of(tokens, 0)[: len(prompt)] == prompt


def test_a_response_that_joins_the_prompts_last_word_is_written_apart() -> None:
    tokenizer = bare_tokenizer()
    whole = tokenizer("the mat")["input_ids"]
    prompt = tokenizer("the m")["input_ids"]
    assert whole[: len(prompt)] != prompt, "else this test shows nothing"
    tokens = encode(tokenizer, chat("the m", "at"), template="none")
    assert ids_of(tokens, 0) == [*prompt, *tokenizer("at")["input_ids"], tokenizer.eos_token_id]


def test_an_end_that_the_response_has_is_not_written_twice() -> None:
    tokenizer = bare_tokenizer()
    once, given = (encode(tokenizer, chat("a", text), template="none") for text in (" b", " b</s>"))
    assert ids_of(once, 0) == ids_of(given, 0)


def test_alpaca_is_the_prompt_of_its_paper() -> None:
    tokenizer = bare_tokenizer()
    plain = chat("Name a cat.", "Tom")
    about = Conversation((Message("user", "Sum up.", "A long text."), Message("assistant", "Short.")))
    tokens = encode(tokenizer, plain, about, template="alpaca")
    assert tokenizer.decode(ids_of(tokens, 0)) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nName a cat.\n\n### Response: Tom</s>"
    )
    assert tokenizer.decode(ids_of(tokens, 1)) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSum up.\n\n### Input:\nA long text."
        "\n\n### Response: Short.</s>"
    )
    assert parts_of(tokens, 1, tokenizer) == [" Short.</s>"]


def test_a_plain_text_is_learned_whole_with_an_eos() -> None:
    tokenizer = bare_tokenizer()
    tokens = encode(tokenizer, Conversation((Message(TEXT, "the cat sat"),)))
    assert tokenizer.decode(ids_of(tokens, 0)) == "the cat sat</s>"
    assert tokens.learned.tolist() == [False] + [True] * (len(tokens.learned) - 1)


def test_a_bos_token_comes_first_where_the_tokenizer_writes_one() -> None:
    tokenizer = chat_tokenizer("mistral")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokens = encode(tokenizer, chat("the cat", " sat"), template="none")
    assert ids_of(tokens, 0).count(tokenizer.bos_token_id) == 1
    assert ids_of(tokens, 0)[0] == tokenizer.bos_token_id
    assert encode(tokenizer, chat("a", "b")).input_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_the_date_of_a_template_does_not_change_from_day_to_day() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert tokenizer.decode(ids_of(encode(tokenizer, chat("a", "b")), 0)).startswith("26 Jul 2024<|im_start|>")


# Bad templates


def refusal(template: str, conversation: Conversation = THREE, **keys: object) -> str:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = template
    with pytest.raises(UserError) as caught:
        encode(tokenizer, chat("fine", "fine"), conversation, **keys)
    assert "cat" not in str(caught.value), "no text of a sample is shown"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_template_that_refuses_a_system_message_says_so() -> None:
    tokenizer = chat_tokenizer("gemma")
    with pytest.raises(UserError, match=r"row 11: .*System role not supported; .*leave data.system out"):
        encode(tokenizer, THREE, system="Answer.")


def test_a_template_that_changes_earlier_turns() -> None:
    thinking = (
        "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}THINK{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}"
    )
    said = refusal(thinking)
    assert "row 12" in said
    assert "data.learn=last" in said
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = thinking
    assert parts_of(encode(tokenizer, THREE, learn="last"), 0, tokenizer) == [f"THINK{ANSWERS[-1]}<|im_end|>"]


def test_a_prompt_that_is_no_prefix() -> None:
    said = refusal(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    assert said.startswith("data.template: row 11: the prompt is no prefix of prompt and answer 1")


def test_a_template_without_an_end_of_turn() -> None:
    assert "no end-of-turn token behind answer 1" in refusal("{% for m in messages %}{{ m.content }}\n{% endfor %}")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages.__class__.__mro__ }}", "tries to leave its sandbox"),
        ("{{ messages[7].role.x }}", "fails: "),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10**9) %}{{ i }}{% endfor %}", "fails: "),
    ],
)
def test_a_template_that_fails_or_tries_to_leave_its_sandbox(template: str, said: str) -> None:
    assert said in refusal(template)


def test_a_template_that_does_not_parse_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}\n{{ m.content }}\n{% endif %}")
    with pytest.raises(UserError, match=r"bad.jinja, line 3: .*endif"):
        encode(bare_tokenizer(), THREE, template=str(tmp_path / "bad.jinja"))
    with pytest.raises(UserError, match=r"no.jinja: cannot be read"):
        encode(bare_tokenizer(), THREE, template=str(tmp_path / "no.jinja"))


def test_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = bare_tokenizer()
    tokens = encode(tokenizer, chat("a", "b"), template=str(tmp_path / "own.jinja"))
    assert tokenizer.decode(ids_of(tokens, 0)) == "user: a</s>assistant: b</s>"
    assert parts_of(tokens, 0, tokenizer) == ["b</s>"]


def test_no_template_where_one_is_needed() -> None:
    with pytest.raises(UserError, match=r"data.template=auto: .* has no chat template; expected .*alpaca.*jinja"):
        encode(bare_tokenizer(), THREE)
    for template in ("alpaca", "none"):
        with pytest.raises(UserError, match=r"row 11: template .* one prompt and one response, found 6 messages"):
            encode(bare_tokenizer(), THREE, template=template)
        with pytest.raises(UserError, match=r"found a system message; leave data.system out"):
            encode(bare_tokenizer(), chat("a", "b"), template=template, system="Answer.")
    with pytest.raises(UserError, match=r"no eos token"):
        encode(bare_tokenizer(eos=None), chat("a", "b"), template="none")
    with pytest.raises(UserError, match=r"data.template=alpaca: the samples are plain texts"):
        encode(bare_tokenizer(), Conversation((Message(TEXT, "a"),)), template="alpaca")

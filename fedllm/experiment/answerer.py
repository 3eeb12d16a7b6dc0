"""Answers of a run's language model to messages, written as the run's samples were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import Message
from fedllm.data.conversations.prompts import Prompter
from fedllm.experiment.generation import generate_answers, room_for, stream_answer
from fedllm.experiment.inference import Inference


class Answerer:
    """The model of a run with its template and system message.

    A run on plain texts continues a text. It is taken for one if its data.format says so, or if data.template is auto
    and the tokenizer has no chat template, without which the run could not have read conversations.
    Raises UserError for a run that trained no language model.
    """

    def __init__(self, model: Inference) -> None:
        run = model.run
        if not run.task.generates:
            raise UserError(f"{run.folder}: the run trained no language model (data.task={run.recipe.data.task})")
        assert run.backbone.tokenizer is not None
        self._model, self._tokenizer = model, run.backbone.tokenizer
        data = run.recipe.data
        texts = data.format == "text" or (data.template == "auto" and not self._tokenizer.chat_template)
        self._prompter = Prompter(self._tokenizer, data, texts=texts)

    @property
    def remembers(self) -> bool:
        """Whether a prompt can have earlier questions and answers."""
        return self._prompter.remembers

    def answers(self, questions: Sequence[Sequence[Message]], new_tokens: int) -> list[str]:
        """The greedy answer to each of n prompts; see generate_answers."""
        prompts = [self._prompter.ids(messages) for messages in questions]
        with self._model.precision():
            return generate_answers(self._model.run.model, self._tokenizer, prompts, new_tokens)

    def stream(
        self, messages: Sequence[Message], new_tokens: int, write: Callable[[str], None], temperature: float = 0.0
    ) -> str:
        """The answer to one prompt; see stream_answer. Raises UserError for a prompt that leaves no room for one."""
        prompt = self._prompter.ids(messages)
        if room_for(self._model.run.model, len(prompt), new_tokens) == 0:
            raise UserError(f"the conversation is {len(prompt):,} tokens long, more than the model has positions for")
        with self._model.precision():
            return stream_answer(self._model.run.model, self._tokenizer, prompt, new_tokens, write, temperature)

"""The recipe sections `data:` and `partition:`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fedllm.common.errors import UserError
from fedllm.common.schema import setting

CAUSAL_LM = "causal_lm"
# Keys that conversations alone have, with their defaults.
OF_CONVERSATIONS: dict[str, Any] = {
    "format": "auto",
    "prompt": None,
    "response": None,
    "messages": None,
    "system": None,
    "template": "auto",
    "learn": "response",
    "too_long": "cut_prompt",
    "choices": None,
    "answer": None,
}
_OF_LABELS = ("label", "classes", "regression", "strip")  # keys that labelled samples alone have
_ANSWER = "answer"  # data.answer where data.choices is given without it


@dataclass(frozen=True)
class DataSettings:
    """The data and the task: a known name, or your own files.

    With `task: causal_lm` the samples are conversations: `format` to `answer` are theirs alone, and `label`,
    `classes`, `regression` and `strip` those of samples with labels. `image`, `image_size` and `augment` are of images
    alone.
    """

    task: Literal["classification", "causal_lm", "image_classification"] = setting(
        "classification",
        "labels of whole texts (classes or numbers), conversations that a causal model continues, or classes of images",
    )
    title: str | None = setting(None, "the data set's name in reports, any text; does not change results")
    name: str | None = setting(None, "glue/<task>, 20newsgroups, a folder of text files, or package:<module>/<folder>")
    train: str | None = setting(
        None, "your own training file: CSV, JSON lines or parquet; or a folder with one per client"
    )
    validation: str | None = setting(None, "your own validation file; without one, `holdout` of train is held out")
    text: list[str] | None = setting(None, "columns of the text, one or two, of your own files")
    label: str | None = setting(None, "column of the label of your own files")
    classes: list[str] | None = setting(
        None,
        "all classes in the order of their ids; null = as the data declare them, else their labels, sorted",
    )
    label_map: dict[str, str] | None = setting(
        None, "new names of labels, {old: new}; several old ones may get one new name, the others keep theirs"
    )
    drop_missing: bool = setting(False, "leave out rows without a text, image or label, and say how many")
    encoding: str = setting("utf-8", "encoding of CSV files, for example cp1252 or utf-16")
    delimiter: str | None = setting(
        None, "character between the cells of CSV files; null = a comma, and a tab in .tsv files"
    )
    regression: bool | None = setting(None, "labels are numbers, not classes; null = where they are not all whole")
    strip: list[Literal["headers", "footers", "quotes"]] | None = setting(
        None, "parts removed from the messages of 20newsgroups; [] = none, null = all three"
    )
    image: str | None = setting(None, "column of the image of your own files, of data.task=image_classification")
    image_size: int | None = setting(
        None, "side in pixels of the square images that are kept; null = their own, where all are equal"
    )
    augment: Literal["none", "standard"] = setting(
        "none", "standard = images of local steps are flipped and cropped at random, never those of an evaluation"
    )
    format: Literal["auto", "messages", "prompt_completion", "instruction", "text"] | None = setting(
        None, "of conversations; null = auto, by the columns' names"
    )
    prompt: str | None = setting(None, "column of the prompt or the instruction; null = prompt, or instruction")
    response: str | None = setting(None, "column of the response; null = completion, or output")
    messages: str | None = setting(None, "column of the messages; null = messages, or conversations")
    system: str | None = setting(None, "system message of conversations without one; null = what the template does")
    template: str | None = setting(
        None, "null or auto = the tokenizer's chat template; alpaca; none = plain text; or a .jinja file"
    )
    learn: Literal["response", "last", "all"] | None = setting(
        None, "what a model learns: every response, the last one, or all tokens; null = response"
    )
    too_long: Literal["drop", "cut_prompt", "cut_response"] | None = setting(
        None,
        "conversations beyond max_length: left out; the beginning of the prompt is cut; or the end of the response, "
        "with its end-of-turn token; null = cut_prompt",
    )
    choices: str | None = setting(None, "column with a list of options, of which one is the response")
    answer: str | None = setting(None, "column of the right option, its place from 0 or its text; null = answer")
    max_length: int = setting(
        None, "tokens of a sample beyond this are cut; null = 128, or 512 with task causal_lm (see too_long)"
    )
    holdout: float = setting(0.2, "fraction of train that is held out if there is no validation split")
    holdout_seed: int = setting(
        0, "seed of the hold-out, and of what clients hold out (eval.per_client, federation.held_out)"
    )
    max_train: int | None = setting(None, "use at most so many training samples")
    max_validation: int | None = setting(None, "use at most so many validation samples")

    def __post_init__(self) -> None:
        conversations = self.task == CAUSAL_LM
        for key in _OF_LABELS if conversations else OF_CONVERSATIONS:
            if (found := getattr(self, key)) is not None:
                others = "that has no labels" if conversations else f"a key of task {CAUSAL_LM} alone"
                raise UserError(f"{key}: found {found!r} with task {self.task}, {others}; leave it out")
        defaults = {"max_length": 512, **OF_CONVERSATIONS} if conversations else {"max_length": 128}
        for key, value in defaults.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        if conversations:
            self._check_conversations()
        elif self.classes is not None:
            self._check_classes(self.classes)

    def _check_classes(self, names: list[str]) -> None:
        if len(names) < 2 or len(set(names)) < len(names):
            raise UserError(f"classes: found {names}, expected two names or more, each of them once")
        if any(not name.strip() or name.encode("utf-8", "replace").decode() != name for name in names):
            raise UserError(f"classes: found {names}, expected names in readable text")
        if self.regression:
            raise UserError("classes: found with regression true, which has no classes; leave one of them out")

    def _check_conversations(self) -> None:
        if self.choices is not None and self.answer is None:
            object.__setattr__(self, "answer", _ANSWER)
        if self.choices is None and self.answer is not None:
            raise UserError(f"answer: found {self.answer!r} without choices, the column of the options; give both")
        if self.choices is not None and self.response is not None:
            raise UserError(
                f"response: found {self.response!r} with choices, of which one is the response; leave it out"
            )
        if self.text is not None and self.format not in ("auto", "text"):
            raise UserError(
                f"text: found {self.text} with format {self.format}, which has no column of text; leave it out"
            )
        if self.text is not None and len(self.text) != 1:
            raise UserError(f"text: found {self.text}, expected one column with task {CAUSAL_LM}")
        if self.template not in ("auto", "alpaca", "none") and not str(self.template).endswith(".jinja"):
            raise UserError(f"template: found '{self.template}', expected auto, alpaca, none or a .jinja file")


CLIENTS = 100  # partition.clients where it is not given


@dataclass(frozen=True)
class PartitionSettings:
    """How the training samples are split over the clients."""

    scheme: Literal[
        "dirichlet_classes", "dirichlet_clients", "dirichlet_clusters", "quantity", "iid", "by_column", "shards"
    ] = setting("dirichlet_classes", "rule of the split")
    alpha: float = setting(
        0.1, "concentration of the Dirichlet distribution, of schemes dirichlet_... and quantity; small = very uneven"
    )
    clients: int | None = setting(
        None, f"number of clients N; null = {CLIENTS}, or the column's number of values with scheme by_column"
    )
    seed: int = setting(0, "seed of the split, apart from run.seed")
    min_size: int = setting(1, "least number of samples per client")
    max_size: int | None = setting(
        None, "most samples per client, of scheme by_column; the others are left out at random; null = no limit"
    )
    drop_small: bool = setting(
        False, "leave out clients with fewer than min_size samples, of scheme by_column; false = they are an error"
    )
    column: str | None = setting(
        None, "column of scheme by_column: one client per value; for data without labels, its values take their place"
    )
    shards_per_client: int = setting(2, "shards per client, of scheme shards")
    clusters: int = setting(10, "clusters of like texts or images, of scheme dirichlet_clusters")
    file: str | None = setting(None, "a partition file; the other keys of this section are then taken from it")

    def __post_init__(self) -> None:
        for key in ("max_size", "drop_small") if self.scheme != "by_column" and self.file is None else ():
            if (found := getattr(self, key)) not in (None, False):
                raise UserError(
                    f"{key}: found {found} with scheme {self.scheme}, expected scheme by_column; leave it out"
                )
        if self.clients is None and self.scheme != "by_column":
            object.__setattr__(self, "clients", CLIENTS)

    @property
    def known_clients(self) -> int | None:
        """The number of clients; None where only a column or a partition file tells it."""
        return None if self.file else self.clients

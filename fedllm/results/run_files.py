"""The files of a run folder as types. pydantic checks their content; the error messages are our own."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs this one up to Python 3.11

from fedllm.results.client_scores import OfClient
from fedllm.results.format import COSTS

_LARGEST = 10**300  # larger numbers could overflow when averaged or plotted


class DamagedError(Exception):
    """Why a run folder cannot be read."""


def _with_all_costs(totals: dict[str, Any]) -> dict[str, Any]:
    if not totals.keys() >= {*COSTS}:
        raise ValueError("a cost is missing")
    return totals


# Each type is a check together with the words that describe it in errors.
Number = Annotated[int | float, Field(gt=-_LARGEST, lt=_LARGEST)]
Score = Annotated[Number | None, Field(description="a number or null")]
Cost = Annotated[int | float, Field(ge=0, lt=_LARGEST, description="a number of 0 or more")]
Whole = Annotated[int, Field(gt=-_LARGEST, lt=_LARGEST, description="a whole number")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Word = Annotated[str, Field(description="a word")]
WordOrNull = Annotated[str | None, Field(description="a word or null")]
Target = Annotated[dict[str, Number] | None, Field(description="null or a number for each metric")]

RecipeKeys = TypedDict(
    "RecipeKeys",
    {
        "algorithm.name": Word,
        "data.name": WordOrNull,
        "eval.target": Target,
        "run.seed": Whole,
        "partition.scheme": WordOrNull,
        "federation.rounds": Whole,
        "federation.clients_per_round": Whole,
    },
)


class Costs(TypedDict):
    """start.json: the costs before round 1."""

    bytes_up: Cost
    bytes_down: Cost
    seconds: Cost
    simulated_seconds: Cost


class OwnScores(TypedDict):
    """Scores of some clients on their own samples: score -> how it is spread, see client_scores.Spread. finetuned: of
    the clients' fine-tuned copies."""

    clients: Count
    samples: Count
    scores: dict[str, dict[str, Number | None]]
    finetuned: NotRequired[dict[str, dict[str, Number | None]]]


class PerClient(TypedDict):
    """Those of the clients that train, and of those that never do."""

    training: NotRequired[OwnScores]
    held_out: NotRequired[OwnScores]


class RoundLine(Costs, extra_items=Score):  # type: ignore[call-arg]  # PEP 728, which mypy does not know yet
    """A line of metrics.jsonl. Every other key is a score of an evaluation, or its loss. missing, sites: of real sites,
    those that have not answered, and the scores of each on its own samples. per_client: the spread of the clients'
    scores on their own samples."""

    round: Whole
    rejected: Annotated[dict[str, Any], Field(description="a reason for each client")]
    clients: NotRequired[Any]
    train_loss: NotRequired[Any]
    eval_seconds: NotRequired[Any]
    update_norm: NotRequired[Any]
    mean_update_norm: NotRequired[Any]
    update_cosine: NotRequired[Any]
    v_spread: NotRequired[Any]
    lora_gap: NotRequired[Any]
    epsilon: NotRequired[Any]
    epsilon_median: NotRequired[Any]
    clipped: NotRequired[Any]
    noise_ratio: NotRequired[Any]
    missing: NotRequired[Any]
    sites: NotRequired[Any]
    per_client: NotRequired[Annotated[PerClient, Field(description="the spread of the clients' scores")]]


class Best(TypedDict):
    """The best value of a metric, and the first round that reached it."""

    value: Number
    round: Whole


class OfValue(TypedDict):
    """The scores of one value of the column `eval.by`."""

    samples: Count
    final: dict[str, Number | None]
    start: NotRequired[dict[str, Number | None]]


class ByValue(TypedDict):
    """The scores of each value of a column."""

    column: str
    values: dict[str, OfValue]


class OfClasses(TypedDict):
    """The scores of each class on the validation split, see tasks.class_scores.ClassScores."""

    names: list[str]
    samples: list[Count]
    recall: list[Number | None]
    precision: list[Number | None]
    auroc: list[Number | None]
    balanced_accuracy: Number | None
    macro_auroc: Number | None
    confusion: list[list[Count]]


class ClientScores(TypedDict):
    """client_scores.json. round: the last evaluated one."""

    round: Whole
    clients: Annotated[list[OfClient], Field(description="the scores of each client")]


class Answer(TypedDict):
    """A line of samples.jsonl."""

    sample: Annotated[Count, Field(description="a whole number")]
    prompt: Word
    reference: Word
    before: Word
    after: Word


class Result(TypedDict):
    """result.json. For an unfinished run: the same keys, for the rounds so far, with the status 'unfinished'."""

    status: Annotated[str, Field(pattern="^finished$", description="'finished'")]
    algorithm: Word
    seed: Whole
    primary: Word
    final: Annotated[dict[str, Number | None], Field(description="a number for each metric")]
    best: Annotated[dict[str, Best], Field(description="a value and a round for each metric")]
    target: Target
    rounds: Whole
    rounds_to_target: Annotated[int | None, Field(description="a whole number or null")]
    rejected: Whole
    totals: Annotated[
        dict[str, Number], AfterValidator(_with_all_costs), Field(description=f"numbers {', '.join(COSTS)}")
    ]
    privacy: NotRequired[Any]
    machine: NotRequired[Any]
    versions: NotRequired[Any]
    vectors_per_round: NotRequired[Any]
    client_vectors: NotRequired[Any]
    client_memory_bytes: NotRequired[Any]
    trainable_parameters: NotRequired[Any]
    start: NotRequired[Annotated[dict[str, Number | None], Field(description="a number for each metric")]]
    by: NotRequired[Annotated[ByValue, Field(description="a column and the scores of its values")]]
    by_class: NotRequired[Annotated[OfClasses, Field(description="the scores of each class")]]


class Clients(TypedDict):
    """partition.json: the number of samples per client and class. Older runs have no digests of their data in it."""

    sizes: Annotated[list[Count], Field(min_length=1, description="a list of whole numbers")]
    classes: Annotated[list[str], Field(description="a list of words")]
    counts: Annotated[list[list[Count]] | None, Field(description="null or a list of whole numbers for each client")]
    column: NotRequired[Annotated[str | None, Field(description="null or a word")]]
    data: NotRequired[Annotated[dict[str, str], Field(description="a digest for each split")]]


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(found: Any, kind: type, where: str, verdict: str = "damaged") -> Any:
    """Returns `found` unchanged. Raises DamagedError unless it has the keys of `kind` with valid values."""
    if not isinstance(found, dict):
        raise DamagedError(f"{where} is {type(found).__name__}, expected an object; {verdict}")
    try:
        _adapter(kind).validate_python(found, strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
    else:
        return found
    if missing := [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing" and len(fault["loc"]) == 1]:
        raise DamagedError(f"{where} lacks {', '.join(missing)}; {verdict}")
    if not faults[0]["loc"]:
        raise DamagedError(f"{where} has a key that is no text; {verdict}")
    key = str(faults[0]["loc"][0])
    raise DamagedError(f"{where}: {key} is {brief(found[key])}, expected {_expected(kind, key)}; {verdict}")


def _expected(kind: type, key: str) -> str:
    """What the value of a key must be, in words."""
    schema = _adapter(kind).json_schema()
    return str(schema["properties"].get(key, schema.get("additionalProperties"))["description"])


def brief(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"

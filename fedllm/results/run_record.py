"""A run, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeGuard

from fedllm.results.client_scores import OfClient
from fedllm.results.format import Axis, Sections, compared, is_number, settings_key
from fedllm.results.names import printable
from fedllm.results.run_files import ByValue, OfValue, PerClient, Result

DATA_FILES = (("data", "train"), ("data", "validation"))
MADE_WITH = (("machine", "precision"), ("versions", "fedllm"))
_GENERIC = ("train", "training", "data")


@dataclass(frozen=True)
class ClientData:
    """partition.json: the number of samples per client, and per client and class.

    sizes: [N]. counts: [N, classes], or [] if samples have no classes. column: the column whose values are the classes,
    for data without labels.
    """

    sizes: list[int]
    classes: list[str]
    counts: list[list[int]]
    column: str | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run, read from its folder.

    recipe: the sections of recipe.yaml. rounds: the lines of metrics.jsonl. result: result.json; for an unfinished run
    the same keys, computed from the rounds so far. start: COSTS before round 1. clients: None if there is no
    partition.json. data: sha256 of the splits "training" and "validation"; {} if unknown. answers: the lines of
    samples.jsonl. client_scores: each client's scores on its own samples, of client_scores.json.
    """

    folder: Path
    recipe: Sections
    rounds: list[dict[str, Any]]
    result: Result
    start: dict[str, float]
    clients: ClientData | None = None
    data: dict[str, str] = field(default_factory=dict)
    answers: list[dict[str, str]] = field(default_factory=list)
    client_scores: list[OfClient] = field(default_factory=list)

    @property
    def by(self) -> ByValue | None:
        """The scores of each value of a column (see comparison.compare), if the run has them; or else of each client on
        its own samples, where clients are the values of a column."""
        if "by" in self.result or not any(each["name"] for each in self.client_scores):
            return self.result.get("by")
        values: dict[str, OfValue] = {
            str(each["name"]): {"samples": each["samples"], "final": each["scores"]} for each in self.client_scores
        }
        return {"column": str(self.recipe["partition"].get("column")), "values": values}

    @property
    def per_client(self) -> PerClient:
        """How the clients' scores were spread at the last evaluation; {} if clients are not evaluated."""
        none: PerClient = {}
        return next((line["per_client"] for line in reversed(self.rounds) if "per_client" in line), none)

    @property
    def key(self) -> str:
        """A text that is equal for runs that differ in nothing but the seed. The files of known data may have moved."""
        settings = compared(self.recipe)
        if self.data:
            settings = {where: value for where, value in settings.items() if where not in DATA_FILES}
        return settings_key(settings | {("digest", name): value for name, value in self.data.items()})

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return bool(self.result["status"] == "finished")

    @property
    def seed(self) -> int:
        """run.seed."""
        return int(self.recipe["run"]["seed"])

    @property
    def made_with(self) -> dict[tuple[str, str], Any]:
        """Values of result.json that must also be equal in two finished runs for their results to be averaged.

        These are the precision, which depends on the machine with run.precision=auto, and fedllm's version.
        """
        places = {where: self.result.get(where[0]) for where in MADE_WITH}
        return {(section, key): told[key] for (section, key), told in places.items() if _has(told, key)}

    @property
    def algorithm(self) -> str:
        """The algorithm's name in the recipe."""
        return printable(self.recipe["algorithm"]["name"])

    @property
    def data_path(self) -> tuple[str, ...]:
        """The data set as parts of a path: only one for data.title and for a name of a hub or package."""
        data = self.recipe["data"]
        if data.get("title"):
            return (printable(str(data["title"])),)
        name = str(data.get("name") or "")
        if name and not name.startswith(("/", ".", "~")):
            return (printable(name.removeprefix("package:")),)
        text = name or str(data.get("train"))
        path = Path(text)
        return tuple(printable(part) for part in path.parts if part != path.anchor) or (printable(text),)

    @property
    def task(self) -> str:
        """A short name of the data set. A file that is called "train" or alike is named with its folder."""
        path = self.data_path
        return "/".join(path[-2 if Path(path[-1]).stem in _GENERIC else -1 :])

    @property
    def primary(self) -> str:
        """The headline metric; "" for an unfinished run without an evaluation."""
        return str(self.result["primary"])

    def best_score(self, metric: str) -> float | None:
        """The best value of a metric so far; None if it was never measured."""
        best = self.result["best"].get(metric)
        return best["value"] if best else None

    def curve(self, metric: str, over: Axis = "round") -> tuple[list[float], list[float]]:
        """x and y of a metric, one point per evaluation.

        Bytes (up and down) and simulated seconds are running totals that include the costs before round 1. Epsilon is
        that of the run so far, in lines that have one.
        """
        spent = [self.start, *self.rounds]
        steps: dict[str, list[Any]] = {
            "round": [line["round"] for line in self.rounds],
            "bytes": list(accumulate(line["bytes_up"] + line["bytes_down"] for line in spent))[1:],
            "simulated_seconds": list(accumulate(line["simulated_seconds"] for line in spent))[1:],
            "epsilon": [line.get("epsilon") for line in self.rounds],
        }
        points = [
            (x, line[metric])
            for x, line in zip(steps[over], self.rounds, strict=True)
            if is_number(line.get(metric)) and is_number(x)
        ]
        return [float(x) for x, _ in points], [float(y) for _, y in points]


def _has(told: Any, key: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(told, dict) and key in told

"""A recipe: YAML and key=value overrides in, frozen dataclasses out, which are the only description of a setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from fedllm.algorithms import Algorithm, algorithm_class, load_algorithm
from fedllm.errors import UserError
from fedllm.layers import read_layers
from fedllm.settings import build, describe, keys, nearest, setting

MOST_THREADS = 1024


@dataclass(frozen=True)
class Model:
    """The frozen base model."""

    name: str = setting("openai-community/gpt2", "hub id, folder, or package:<module>")
    pretrained: bool = setting(True, "load its weights; false asks for a random start")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "dtype of the frozen weights")
    quantize: Literal["none", "4bit", "8bit"] = setting("none", "bitsandbytes quantisation of the frozen weights")
    dropout: float | None = setting(None, "rate of the model's own dropout layers; null = the model's own rates")


@dataclass(frozen=True)
class Lora:
    """The adapter."""

    rank: int = setting(16, "rank r")
    alpha: float = setting(32.0, "scale: the adapter counts alpha/r")
    dropout: float = setting(0.0, "dropout on the adapter's input")
    targets: list[str] = setting(["query", "value"], "roles that get an adapter: query, key, value, output")


@dataclass(frozen=True)
class Data:
    """The task: a known name, or your own files."""

    name: str | None = setting(None, "glue/<task>, 20newsgroups, a folder of text files, or package:<module>/<folder>")
    train: str | None = setting(None, "your own training file: CSV, JSON lines or parquet")
    validation: str | None = setting(None, "your own validation file; without one, `holdout` of train is held out")
    text: list[str] | None = setting(None, "columns of the text, one or two, of your own files")
    label: str | None = setting(None, "column of the label of your own files")
    regression: bool | None = setting(None, "labels are numbers, not classes; null = where they are not all whole")
    max_length: int = setting(128, "tokens beyond this are cut")
    holdout: float = setting(0.2, "fraction of train held out where there is no validation split")
    holdout_seed: int = setting(0, "seed of the hold-out")
    max_train: int | None = setting(None, "use at most so many training samples")
    max_validation: int | None = setting(None, "use at most so many validation samples")


@dataclass(frozen=True)
class Partition:
    """How the training samples are shared over the clients."""

    scheme: Literal["dirichlet_classes", "dirichlet_clients", "iid", "by_column", "shards"] = setting(
        "dirichlet_classes", "rule of the split"
    )
    alpha: float = setting(0.1, "concentration of the Dirichlet distribution; small = very non-IID")
    clients: int | None = setting(100, "number of clients N")
    seed: int = setting(0, "seed of the split, apart from run.seed")
    min_size: int = setting(1, "fewest samples that a client may have")
    column: str | None = setting(None, "column of scheme by_column: one client a value")
    shards_per_client: int = setting(2, "shards a client gets under scheme shards")
    file: str | None = setting(None, "a partition file; the other keys of this section are then taken from it")


@dataclass(frozen=True)
class Federation:
    """The rounds."""

    rounds: int = setting(100, "number of rounds T")
    clients_per_round: int = setting(10, "clients sampled each round S")
    tracked_per_round: int | None = setting(None, "sampled clients that send their tracking vector; null = all S")
    min_clients: int = setting(1, "accepted uploads below which the run stops")

    def __post_init__(self) -> None:
        _positive(self, "rounds", "clients_per_round", "min_clients")
        if self.min_clients > self.clients_per_round:
            raise UserError(
                f"min_clients: found {self.min_clients}, expected at most clients_per_round={self.clients_per_round}"
            )


@dataclass(frozen=True)
class Local:
    """A client's work in a round."""

    epochs: int | None = setting(None, "passes over the client's data (1 where steps is not given either)")
    steps: int | None = setting(None, "local steps K, instead of epochs; a small client reshuffles and goes on")
    batch_size: int = setting(32, "samples a step; a client with fewer uses what it has")

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise UserError(f"steps: found both epochs={self.epochs} and steps={self.steps}, expected one of them")
        _positive(self, "epochs", "steps", "batch_size")


@dataclass(frozen=True)
class Eval:
    """Evaluation on the whole validation split."""

    every: int = setting(1, "rounds between evaluations; the last round is always evaluated")
    target: dict[str, float] | None = setting(None, "metric: value to reach, for rounds-to-target")
    stop_at_target: bool = setting(False, "end the run when the target is reached")

    def __post_init__(self) -> None:
        _positive(self, "every")
        if self.stop_at_target and not self.target:
            raise UserError("stop_at_target: found true without a target, expected one such as {accuracy: 0.8}")
        for name, value in (self.target or {}).items():
            if value > 1:
                raise UserError(f"target: found {name}: {value:g}, expected at most 1, where every metric ends")


@dataclass(frozen=True)
class Run:
    """How and where it runs; but for seed and precision, nothing here touches more than the rounding of a number."""

    seed: int = setting(0, "seed of every draw but the partition's")
    dir: str | None = setting(None, "run folder; null = runs/<recipe>-s<seed>")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto = a GPU where there is one")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "autocast dtype; auto = bfloat16 where it is fast"
    )
    threads: int | None = setting(None, "CPU threads of a process; null = its part of the cores it may use")
    cohort: int | Literal["auto"] = setting("auto", "clients trained together")
    shares: int | Literal["auto"] = setting(
        "auto", "parts that a round's clients are dealt into by work; auto = one for each process"
    )
    slices: int | Literal["auto"] = setting(
        "auto", "auto = several samples packed in a row; a number: padded, in that many length-sorted slices"
    )
    gradient_checkpointing: bool = setting(
        False, "keep the inputs of the model's blocks only and compute them again: less memory, a third more time"
    )
    timeout: float = setting(3600.0, "seconds that one process waits for another before the run stops")
    checkpoint_every: int = setting(10, "rounds between checkpoints")
    resume: Literal["auto", "never"] = setting("auto", "auto = go on from the run folder's last good checkpoint")
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = setting(
        ["tensorboard"], "where the rounds' numbers are shown live; [] = nowhere"
    )
    local_hub: str | None = setting(None, "folder with models/ and datasets/; null = FEDLLM_LOCAL_HUB")

    def __post_init__(self) -> None:
        _positive(self, "threads", "cohort", "shares", "slices", "timeout", "checkpoint_every")
        if self.threads and self.threads > MOST_THREADS:
            raise UserError(f"threads: found {self.threads}, expected at most {MOST_THREADS}")


@dataclass(frozen=True)
class Costs:
    """What the simulated run time assumes."""

    bandwidth_mbit: float = setting(100.0, "bandwidth of a client's link, Mbit/s")

    def __post_init__(self) -> None:
        _positive(self, "bandwidth_mbit")


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe. `algorithm` is the section as given, defaults filled in; `load` makes the object."""

    name: str
    algorithm: dict[str, Any]
    model: Model
    lora: Lora
    data: Data
    partition: Partition
    federation: Federation
    local: Local
    eval: Eval
    run: Run
    costs: Costs

    def load_algorithm(self) -> Algorithm:
        """The algorithm object of the `algorithm:` section."""
        settings = {key: value for key, value in self.algorithm.items() if key != "name"}
        return load_algorithm(self.algorithm["name"], **settings)

    def sections(self) -> dict[str, dict[str, Any]]:
        """Plain data, section by section, every default filled in."""
        return {name: _plain(getattr(self, name)) for name in _SECTIONS}

    def yaml(self) -> str:
        """The resolved recipe as YAML that load_recipe reads back."""
        return str(yaml.safe_dump(self.sections(), sort_keys=False, default_flow_style=None, width=100))


SECTION_TYPES: dict[str, type] = {
    "model": Model, "lora": Lora, "data": Data, "partition": Partition, "federation": Federation,
    "local": Local, "eval": Eval, "run": Run, "costs": Costs,
}  # fmt: skip
# Settings that change no number beyond its rounding: a run may be resumed, and runs may be compared, under others.
FREE_KEYS = frozenset(
    ("run", key)
    for key in ("dir", "resume", "checkpoint_every", "local_hub", "threads", "shares", "timeout", "trackers")
)
# Settings that a run chooses once and keeps: it is resumed with its own choice, whatever the recipe says by then.
CHOSEN_KEYS = ("cohort", "slices")
_SECTIONS = ["model", "lora", "data", "partition", "algorithm", "federation", "local", "eval", "run", "costs"]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with overrides "section.key=value" or "section={...}" on top.

    A file may say `extends: other.yaml` (beside it) and give only what differs. It may list `algorithms:`, the settings
    that each algorithm has in it; then `algorithm: fedavg` is enough to choose one, and is added to the recipe's name.
    Raises UserError naming file, key, what was found and what was expected, before any model is loaded.
    """
    path = Path(path)
    values = read_layers(path, overrides)
    try:
        return make_recipe(values, path.stem, str(path))
    except UserError as error:
        for override in overrides:
            key = override.partition("=")[0].strip()
            if str(error).startswith(f"{path}: {key}: "):
                raise UserError(f"{error} (given as the override '{override}')") from None
        raise


def make_recipe(values: Mapping[str, Any], name: str, where: str) -> Recipe:
    """A recipe from plain data, such as Recipe.sections gives. where: how errors name its place."""
    for section in values:
        if section not in (*_SECTIONS, "algorithms"):
            inside = [f"{name}.{section}" for name, cls in SECTION_TYPES.items() if section in keys(cls)]
            known = f" (did you mean '{inside[0]}'?)" if inside else nearest(str(section), [*_SECTIONS, "algorithms"])
            raise UserError(f"{where}: unknown section '{section}'{known}; known sections: {', '.join(_SECTIONS)}")
        if not isinstance(values[section], Mapping):
            raise UserError(f"{where}: {section}: found {values[section]!r}, expected keys and values")
    table = values.get("algorithms", {})
    algorithm = _algorithm(values.get("algorithm", {}), table, where)
    sections: dict[str, Any] = {
        section: build(cls, values.get(section, {}), f"{where}: {section}") for section, cls in SECTION_TYPES.items()
    }
    if sections["data"].name is None and sections["data"].train is None:
        raise UserError(
            f"{where}: data.name: missing; expected a data set's name, or data.train with data.text, data.label"
        )
    chosen = "_" + algorithm["name"].rpartition(":")[2]
    if table and not name.endswith(chosen):
        name += chosen
    return Recipe(name=name, algorithm=algorithm, **sections)


def _algorithm(values: Mapping[str, Any], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `algorithm:` section over the settings that the table `algorithms:` has for it, over its own defaults."""
    if "name" not in values:
        raise UserError(f"{where}: algorithm.name: missing; expected an algorithm, for example fadamgc")
    for name, settings in table.items():
        if not isinstance(settings, Mapping) or "name" in settings:
            raise UserError(f"{where}: algorithms.{name}: found {settings!r}, expected settings such as {{lr: 0.1}}")
        load_algorithm(str(name), where=f"{where}: algorithms.{name}", **settings)
    name = str(values["name"])
    given = {key: value for key, value in values.items() if key != "name"}
    cls = type(load_algorithm(name, where=f"{where}: algorithm"))
    listed = (settings for entry, settings in table.items() if algorithm_class(str(entry)) is cls)
    algorithm = load_algorithm(name, where=f"{where}: algorithm", **{**next(listed, {}), **given})
    filled = {key: getattr(algorithm, field) for key, field in keys(cls).items()}
    return {"name": name, **_plain(filled)}


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as YAML's own types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(getattr(value, name)) for key, name in keys(type(value)).items()}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _positive(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if isinstance(value, int | float) and not value > 0:
            raise UserError(f"{name}: found {value}, expected a positive number")


def help_text() -> str:
    """Every key of a recipe, its type, default and meaning, from the dataclasses."""
    lines = []
    for section, cls in SECTION_TYPES.items():
        lines.append(f"{section}: {(cls.__doc__ or '').splitlines()[0]}")
        defaults = cls()
        for field in dataclasses.fields(cls):
            kind = describe(get_type_hints(cls)[field.name])
            default = "null" if (value := getattr(defaults, field.name)) is None else value
            lines.append(f"  {section}.{field.name:<18} {field.metadata['help']}  [{kind}; default {default}]")
        lines.append("")
    lines.append("algorithm: name, lr, server_lr, ...: see `fedllm algorithms` and `fedllm algorithms NAME`")
    lines.append("algorithms: the settings of each algorithm in this recipe; algorithm=NAME chooses one")
    return "\n".join(lines)

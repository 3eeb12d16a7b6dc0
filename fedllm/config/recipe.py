"""Reads a recipe, YAML with overrides key=value, into frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import MEAN, DownloadsSettings, RobustSettings, UploadsSettings
from fedllm.algorithms import Algorithm, canonical_name, load_algorithm
from fedllm.common.errors import UserError
from fedllm.common.schema import build, key_aliases, keys, nearest, without_nulls
from fedllm.config.algorithm_choice import Choice
from fedllm.config.client_checks import check_own_evaluation
from fedllm.config.privacy_checks import check_privacy, check_sampling
from fedllm.config.settings import (
    SAMPLED,
    CostsSettings,
    DeploymentSettings,
    EvalSettings,
    FederationSettings,
    LocalSettings,
    RunSettings,
)
from fedllm.config.shipped_recipes import find_recipe
from fedllm.config.trained_weights import misfit_of_weights
from fedllm.config.yaml_layers import KeyRules, read_layers, require_keys_of_no_null
from fedllm.data.settings import OF_CONVERSATIONS, DataSettings, PartitionSettings
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.tasks.loss_settings import LossSettings


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe.

    algorithm: the section as given, defaults filled in; `load_algorithm` makes the object. lora: None to train all
    weights of the model. privacy: None without differential privacy. notes: what the user should know of how the layers
    were merged. folder: where the file of the recipe is; None for one that was made.
    """

    name: str
    algorithm: dict[str, Any]
    model: ModelSettings
    lora: LoraSettings | None
    data: DataSettings
    partition: PartitionSettings
    federation: FederationSettings
    local: LocalSettings
    eval: EvalSettings
    run: RunSettings
    uploads: UploadsSettings
    costs: CostsSettings
    robust: RobustSettings = field(default_factory=RobustSettings)
    downloads: DownloadsSettings = field(default_factory=DownloadsSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    privacy: PrivacySettings | None = None
    deployment: DeploymentSettings = field(default_factory=DeploymentSettings)
    notes: tuple[str, ...] = field(default=(), compare=False)
    folder: Path | None = field(default=None, compare=False)

    def for_clients(self, count: int) -> Recipe:
        """The recipe with the clients per round that it has with `count` clients, where it does not give them.

        Raises UserError where these are too few for other settings."""
        recipe = self
        if self.federation.clients_per_round is None:
            try:
                federation = replace(self.federation, clients_per_round=min(SAMPLED, count))
            except UserError as error:
                raise UserError(f"federation.{error}, of {count} clients") from error
            recipe = replace(self, federation=federation)
        recipe.require_robust()
        return recipe

    def require_robust(self) -> None:
        """Raises UserError where the section `robust` does not fit the algorithm or the clients per round."""
        federation = self.federation
        if self.robust == MEAN:
            return
        given = (federation.clients_per_round, federation.tracked_per_round)
        if why := self.robust.misfit(self.load_algorithm(), *given, federation.sampling):
            raise UserError(why)
        if self.privacy is not None and self.privacy.level == "client":
            raise UserError(
                f"privacy: found robust.rule={self.robust.rule}, expected mean without robust.norm: what one client "
                "can change by another rule is not bounded, so no epsilon is known; leave out one of the sections"
            )

    @property
    def takes_turns(self) -> bool:
        """Whether rounds train B and A of LoRA in turn."""
        return self.lora is not None and self.lora.train == "turns"

    @property
    def trained_folder(self) -> str:
        """The folder of a run folder that holds what was trained."""
        return "model" if self.lora is None else "adapter"

    def load_algorithm(self) -> Algorithm:
        """The algorithm object of the `algorithm:` section."""
        settings = {key: value for key, value in self.algorithm.items() if key != "name"}
        return load_algorithm(self.algorithm["name"], **settings)

    def sections(self) -> dict[str, dict[str, Any]]:
        """Plain data, section by section, every default filled in. A section that is null has no keys."""
        return {name: _plain(getattr(self, name)) or {} for name in _SECTIONS}

    def yaml(self) -> str:
        """The resolved recipe as YAML that load_recipe reads back."""
        values = {name: keys or None for name, keys in self.sections().items()}
        return str(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=100))


SECTION_TYPES: dict[str, type] = {
    "model": ModelSettings,
    "lora": LoraSettings,
    "data": DataSettings,
    "partition": PartitionSettings,
    "federation": FederationSettings,
    "local": LocalSettings,
    "loss": LossSettings,
    "eval": EvalSettings,
    "run": RunSettings,
    "uploads": UploadsSettings,
    "downloads": DownloadsSettings,
    "robust": RobustSettings,
    "privacy": PrivacySettings,
    "costs": CostsSettings,
    "deployment": DeploymentSettings,
}
# Other names that recipes, grids and overrides may give for a key. What fedllm writes has the key.
ALIASES = {(section, alias): key for section, cls in SECTION_TYPES.items() for alias, key in key_aliases(cls).items()}
# Sections that may be null, and those that are null where they are not given.
OPTIONAL = ("lora", "privacy")
_NULL_UNLESS_GIVEN = ("privacy",)
# Keys of which a recipe gives one: in a higher layer it takes the place of the other.
RIVALS = {("local", "epochs"): "steps", ("local", "steps"): "epochs"}
# Settings that change results by rounding at most. Runs that differ in them may be resumed and compared.
FREE_KEYS = frozenset(
    ("run", key)
    for key in (
        "dir",
        "resume",
        "checkpoint_every",
        "local_hub",
        "threads",
        "shares",
        "timeout",
        "trackers",
        "max_hours",
        "engine",
    )
) | {
    ("data", "title"),
    ("eval", "keep_best"),
    *(("deployment", key) for key in keys(DeploymentSettings) if key != "keep_local"),
}
# Settings that a run chooses once. It is resumed with its own choice, also if the recipe has changed since.
CHOSEN_KEYS = ("stacked_clients", "slices")
# Settings whose "auto" or null a run replaces by its choice in its recipe.yaml; runs that chose differently are not
# comparable.
DECIDED_KEYS = frozenset({("model", "head"), ("data", "image_size"), ("privacy", "noise"), ("privacy", "delta")})
# Keys that recipe.yaml of an earlier version lacks, with the value that says what that version did.
_LATER_KEYS = {
    ("model", "head"): "new",
    ("model", "norm"): "average",
    ("lora", "train"): "AB",
    ("loss", "class_weights"): None,
    ("loss", "label_smoothing"): 0.0,
    ("loss", "focal"): 0.0,
    ("federation", "sampling"): "fixed",
    ("federation", "held_out"): None,
    ("local", "finetune_steps"): None,
    ("uploads", "clip"): None,
    ("uploads", "bits"): "float32",
    ("downloads", "bits"): "float32",
    ("robust", "rule"): "mean",
    ("robust", "faulty"): None,
    ("robust", "norm"): None,
    ("costs", "seconds_per_step"): None,
    ("data", "task"): "classification",
    **{("data", key): None for key in OF_CONVERSATIONS},
    ("data", "classes"): None,
    ("data", "image"): None,
    ("data", "image_size"): None,
    ("data", "augment"): "none",
    ("eval", "metric"): None,
    ("eval", "patience"): None,
    ("eval", "keep_best"): False,
    ("eval", "start"): False,
    ("eval", "per_client"): None,
    ("eval", "by"): None,
    ("eval", "by_class"): False,
    ("eval", "samples"): 0,
    ("eval", "new_tokens"): 48,
    ("deployment", "keep_local"): None,
}
_LATER_SECTIONS = ("loss", "uploads", "downloads", "robust", "privacy", "deployment")
_SECTIONS = [
    "model", "lora", "data", "partition", "algorithm", "federation", "local", "loss", "uploads", "downloads", "robust",
    "privacy", "eval", "run", "costs", "deployment",
]  # fmt: skip


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with overrides "section.key=value" or "section={...}" on top.

    A file may say `extends: other.yaml` (beside it) and give only what differs. Layers are merged section by section
    and key by key; null returns a key to its default. A recipe may list `algorithms:`, the settings that each algorithm
    has in it. Where a path in recipes/ has no file, the recipe of that name that is installed with fedllm is
    read. `algorithm: fedavg` is short for `algorithm: {name: fedavg}`. A setting of the algorithm is the one given
    with its name, or else the one listed, or else the one that lower layers gave for another algorithm.
    Raises UserError naming file, key, what was found and what was expected, before any model is loaded.
    """
    path = Path(find_recipe(str(path)))
    try:
        layers = read_layers(path, overrides, KeyRules(ALIASES, RIVALS))
        require_keys_of_no_null(layers, ("lora",))
        values = layers.sections(KeyRules(ALIASES, RIVALS))
        return replace(_resolved(values, layers.choice(), path.stem, str(path)), folder=path.parent)
    except UserError as error:
        for override in overrides:
            key = override.partition("=")[0].strip()
            if str(error).startswith(f"{path}: {key}: "):
                raise UserError(f"{error} (given as the override '{override}')") from None
        raise


def make_recipe(values: Mapping[str, Any], name: str, where: str) -> Recipe:
    """A recipe from plain data, such as Recipe.sections gives. where: how errors name its place."""
    others = {section: keys for section, keys in values.items() if section != "algorithm"}
    return _resolved(others, Choice.of(values.get("algorithm", {}), where), name, where)


def _resolved(values: Mapping[str, Any], choice: Choice, name: str, where: str) -> Recipe:
    """A recipe from its sections but `algorithm`, and the choice of the algorithm."""
    _check_sections(values, where)
    table = values.get("algorithms", {})
    algorithm, notes = choice.resolve(table, where)
    sections: dict[str, Any] = {
        section: None
        if values.get(section, None if section in _NULL_UNLESS_GIVEN else {}) is None
        else build(cls, without_nulls(cls, values.get(section, {})), f"{where}: {section}.")
        for section, cls in SECTION_TYPES.items()
    }
    if sections["data"].name is None and sections["data"].train is None and not values.get("deployment"):
        raise UserError(
            f"{where}: data.name: missing; expected a data set's name, or data.train with data.text, data.label"
        )
    chosen = "_" + algorithm["name"].rpartition(":")[2]
    if table and not name.endswith(chosen):
        name += chosen
    recipe = Recipe(name=name, algorithm=_plain(algorithm), notes=notes, **sections)
    if why := misfit_of_weights(recipe.lora, recipe.model, recipe.run):
        raise UserError(f"{where}: {why}")
    try:
        check_own_evaluation(recipe.eval, recipe.local, recipe.privacy)
        _check_uploads(recipe)
        recipe.require_robust()
        count = recipe.partition.known_clients
        return recipe if count is None else recipe.for_clients(count - recipe.federation.clients_held_out(count))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _check_uploads(recipe: Recipe) -> None:
    """Raises UserError, naming the key, for settings of sampling, uploads and privacy that do not go together."""
    check_sampling(recipe.federation)
    if recipe.uploads.clip is not None:
        recipe.uploads.norms(recipe.load_algorithm())
    if recipe.takes_turns and recipe.deployment.keep_local is not None:
        raise UserError(
            "lora.train: found turns with deployment.keep_local, expected one of the two: a head that stays at a "
            "client takes no turns; set lora.train=B or leave keep_local out"
        )
    if recipe.privacy is not None and recipe.deployment.keep_local is not None:
        raise UserError(
            "privacy: found with deployment.keep_local, expected one of the two: a head that stays at a client is "
            "trained without noise, and its scores tell of it"
        )
    if recipe.privacy is not None:
        check_privacy(recipe.privacy, recipe.federation, recipe.local, recipe.uploads, recipe.load_algorithm())


def _check_sections(values: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a section that recipes do not have, and for one without keys and values."""
    for section in values:
        if section not in (*_SECTIONS, "algorithms"):
            inside = [f"{name}.{section}" for name, cls in SECTION_TYPES.items() if section in keys(cls)]
            known = f" (did you mean '{inside[0]}'?)" if inside else nearest(str(section), [*_SECTIONS, "algorithms"])
            raise UserError(f"{where}: unknown section '{section}'{known}; known sections: {', '.join(_SECTIONS)}")
        if not isinstance(values[section], Mapping) and not (section in OPTIONAL and values[section] is None):
            raise UserError(f"{where}: {section}: found {values[section]!r}, expected keys and values")


def own_sections(values: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """The sections of a recipe.yaml that any version wrote, see own_keys.

    A section that the version did not have yet gets the values that say what the version did.
    """
    missing: dict[str, dict[str, Any]] = {section: {} for section in _LATER_SECTIONS if section not in values}
    return {section: own_keys(section, keys) for section, keys in (dict(values) | missing).items()}


def own_keys(section: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of a section that any version wrote, under the keys of this version and with the stable name of the
    algorithm. A section that is null has no keys."""
    if values is None:
        return {}
    later = {key: value for (place, key), value in _LATER_KEYS.items() if place == section}
    own = later | {ALIASES.get((section, key), key): value for key, value in values.items()}
    if section == "algorithm" and isinstance(name := own.get("name"), str):
        own["name"] = canonical_name(name)
    return own


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as YAML's own types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(getattr(value, name)) for key, name in keys(type(value)).items()}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

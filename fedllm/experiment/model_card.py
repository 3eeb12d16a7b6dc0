"""The model card, README.md, of an adapter folder: what it is, how it was trained and scored, and how to load it.

It has the settings, digests and scores of the run, and never a text of the data or a path of this machine. The same run
gives the same card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedllm.common.errors import cut_name
from fedllm.common.hub import PACKAGE, is_hub_name
from fedllm.config.recipe import Recipe
from fedllm.data.known_datasets import KNOWN_DATASETS, text_columns
from fedllm.data.known_images import KNOWN_IMAGES, reads_images
from fedllm.data.tokenization import pair_separator
from fedllm.experiment.causal_card import causal_loading, causal_task
from fedllm.experiment.client_guarantee import client_card
from fedllm.experiment.image_card import image_loading
from fedllm.experiment.records import versions
from fedllm.experiment.sample_guarantee import sample_card
from fedllm.models.loading import Backbone
from fedllm.results.format import LOSS, outcome
from fedllm.results.names import NO_LICENCE, printable, setting_text
from fedllm.tasks.base import Task

MOST_CLASSES = 30  # classes that a card lists
_HUB_METRICS = {"macro_f1": "f1", "pearson": "pearsonr", "token_accuracy": "accuracy"}  # where the Hub has another name


@dataclass(frozen=True)
class TrainedOn:
    """What a card says of a run beside its recipe. metrics: the lines of metrics.jsonl up to the adapter's round.

    data: digest of each split, see Job.data. clients: N, or None if the run folder does not tell. dim: the number of
    trained values.
    """

    metrics: Sequence[Mapping[str, Any]]
    data: Mapping[str, str]
    clients: int | None
    dim: int


def model_card(recipe: Recipe, backbone: Backbone, task: Task, trained: TrainedOn, *, merged: bool = False) -> str:
    """The text of README.md. merged: for a folder with the whole model, the adapter merged into its base."""
    base, data = _base(recipe), _data_name(recipe)
    whole = merged or recipe.lora is None
    parts = [
        f"---\n{_metadata(recipe, backbone, task, whole)}---",
        f"# {base} {'fine-tuned' if recipe.model.pretrained else 'trained from random weights'} on {data}",
        f"A {_kind(recipe, backbone, merged)}, trained by federated learning with fedllm.",
        _table(["", ""], _facts(recipe, backbone, task, trained, base, data)),
        f"## Scores\n\n{_scores(task, trained.metrics, recipe.run.seed)}",
        f"## Load it\n\n```python\n{_loading(recipe, backbone, task, whole)}```",
        *([_GROUP_NORM] if recipe.model.norm == "group" and not hasattr(backbone.model.config, "norm") else []),
        *([] if whole or _is_on_hub(backbone) else [_WHERE_THE_BASE_IS]),
        f"## Versions\n\n{', '.join(f'{name} {number}' for name, number in versions().items())}",
    ]
    return "\n\n".join(parts) + "\n"


def _kind(recipe: Recipe, backbone: Backbone, merged: bool) -> str:
    if recipe.lora is None:
        return "model with all its weights"
    return "model with a merged LoRA adapter" if merged else f"LoRA adapter{_with_head(backbone)}"


_WHERE_THE_BASE_IS = (
    "The base model has no name on the Hub. `base_model_name_or_path` in `adapter_config.json` is its place on the\n"
    "machine of the run; on another machine, write its place there."
)


_GROUP_NORM = (
    "In training, group norm took the place of this model's batch norm, which its config cannot say. After\n"
    '`from_pretrained`, call `fedllm.models.norms.apply_norm(model, "group", folder)`, which keeps scale and shift.'
)


# The front matter


def _metadata(recipe: Recipe, backbone: Backbone, task: Task, whole: bool) -> str:
    """The YAML that the Hub reads. It has only what is known: no base without a name on the Hub, no licence."""
    algorithm = str(recipe.algorithm["name"]).rpartition(":")[2]
    values: dict[str, Any] = {"library_name": "transformers" if whole else "peft"}
    if _is_on_hub(backbone) and recipe.model.pretrained:
        values |= {"base_model": backbone.base_name, "base_model_relation": "finetune" if whole else "adapter"}
    if hub := _data_on_hub(recipe):
        values["datasets"] = [hub]
    values["pipeline_tag"] = _pipeline(recipe, task)
    values["metrics"] = list(dict.fromkeys(_HUB_METRICS.get(name, name) for name in task.metric_names))
    values["tags"] = [*(["lora"] if recipe.lora else []), "federated-learning", "fedllm", printable(algorithm)]
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return f"{text}{NO_LICENCE}\n"


def _pipeline(recipe: Recipe, task: Task) -> str:
    if task.generates:
        return "text-generation"
    return "image-classification" if reads_images(recipe.data) else "text-classification"


def _is_on_hub(backbone: Backbone) -> bool:
    """Whether the base's name is one of the Hub, where a folder has an absolute path."""
    return not Path(backbone.base_name).is_absolute()


def _data_on_hub(recipe: Recipe) -> str | None:
    name = recipe.data.name
    if name is None:
        return None
    if known := KNOWN_DATASETS.get(name) or KNOWN_IMAGES.get(name):
        return known.hub[0]
    return "/".join(name.split("/")[:2]) if "/" in name and is_hub_name(name) else None


# The facts


def _base(recipe: Recipe) -> str:
    name = recipe.model.name
    return _plain(name if name.startswith(PACKAGE) or is_hub_name(name) else Path(name).name)


def _data_name(recipe: Recipe) -> str:
    data = recipe.data
    if data.title or data.name is None:
        return _plain(data.title or Path(str(data.train)).name)
    return _plain(data.name if data.name.startswith(PACKAGE) or is_hub_name(data.name) else Path(data.name).name)


def _with_head(backbone: Backbone) -> str:
    return " with its head" if backbone.head else ""


def _facts(recipe: Recipe, backbone: Backbone, task: Task, trained: TrainedOn, base: str, data: str) -> list[list[str]]:
    model, federation = recipe.model, recipe.federation
    digests = [f"sha256 of the {split} split `{trained.data[split]}`" for split in _SPLITS if split in trained.data]
    quantize = "" if model.quantize == "none" else f", quantised to {model.quantize}"
    count = f"{trained.clients:,}, of which " if trained.clients is not None else ""
    algorithm = {key: value for key, value in recipe.algorithm.items() if key != "name" and value is not None}
    return [
        ["base model", f"{base} ({model.dtype}{quantize})"],
        ["task", _task(task, recipe)],
        ["data", "; ".join([data, *digests])],
        ["clients", f"{count}{federation.clients_per_round} train in a round; {_partition(recipe)}"],
        ["algorithm", f"`{_plain(str(recipe.algorithm['name']))}`: {_settings(algorithm)}"],
        ["local training", _local(recipe)],
        _trained_values(recipe, backbone, trained),
        ["rounds", f"{trained.metrics[-1]['round']:,}"],
        *client_card(recipe, trained.clients, trained.metrics[-1]["round"]),
        *sample_card(recipe, trained.metrics),
        ["seed", str(recipe.run.seed)],
        ["licence", "to be filled in"],
    ]


_SPLITS = ("training", "validation")


def _trained_values(recipe: Recipe, backbone: Backbone, trained: TrainedOn) -> list[str]:
    if (lora := recipe.lora) is None:
        norm = "" if recipe.model.norm == "average" else f"; batch norm: {recipe.model.norm}"
        return ["weights", f"all, {trained.dim:,} trained values{norm}"]
    scaling = ({} if lora.scaling == "standard" else {"scaling": lora.scaling}) | ({"dora": True} if lora.dora else {})
    adapter = {"rank": lora.rank, "alpha": lora.alpha, **scaling, "dropout": lora.dropout, "targets": lora.targets}
    head = " with the head" if backbone.head else ""
    return ["adapter", f"{_settings(adapter)}; {trained.dim:,} trained values{head}"]


def _task(task: Task, recipe: Recipe) -> str:
    if task.generates:
        return _plain(causal_task(recipe))
    what = "an image" if reads_images(recipe.data) else "a pair of texts" if _is_pair(recipe) else "a text"
    if not task.classes:
        return f"{task.describe()}: one number for {what}"
    names = ", ".join(f"`{_plain(cut_name(name))}`" for name in task.classes[:MOST_CLASSES])
    more = f" and {len(task.classes) - MOST_CLASSES:,} more" if len(task.classes) > MOST_CLASSES else ""
    return f"classification of {what}, {task.describe()}: {names}{more}"


def _is_pair(recipe: Recipe) -> bool:
    return len(text_columns(recipe.data)) == 2


def _partition(recipe: Recipe) -> str:
    partition = recipe.partition
    if partition.file is not None:
        return f"partition file {_plain(Path(partition.file).name)}"
    of_scheme = {
        "dirichlet_classes": ["alpha"],
        "dirichlet_clients": ["alpha"],
        "dirichlet_clusters": ["alpha", "clusters"],
        "quantity": ["alpha"],
        "shards": ["shards_per_client"],
        "by_column": [] if partition.max_size is None else ["max_size"],
    }
    names = [*of_scheme.get(partition.scheme, []), "seed"]
    return f"partition {partition.scheme}, {_settings({name: getattr(partition, name) for name in names})}"


def _local(recipe: Recipe) -> str:
    local = recipe.local
    amount = {"epochs": local.epochs or 1} if local.steps is None else {"steps": local.steps}
    data = recipe.data
    size = f"max. {data.max_length} tokens per sample"
    if reads_images(data):
        size = f"images of {data.image_size} x {data.image_size} pixels, augmentation {data.augment}"
    return f"{_settings(amount)}, batch size {local.batch_size}, {size}"


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_plain(setting_text(value))}" for key, value in values.items()) or "no settings"


# The scores


def _scores(task: Task, metrics: Sequence[Mapping[str, Any]], seed: int) -> str:
    """The scores of the last evaluation and the best ones, as a table."""
    lines = [dict(line) for line in metrics]
    if not (scored := [line["round"] for line in lines if LOSS in line]):
        return "No round was evaluated yet."
    found = outcome([*task.metric_names, LOSS], None, lines)
    rows = [
        [name, _number(found["final"][name]), _number(best.get("value")), str(best.get("round", "-"))]
        for name in found["final"]
        for best in [found["best"].get(name, {})]
    ]
    table = _table(["score", f"round {scored[-1]}", "best", "round of the best"], rows)
    weights = f"The weights are those of round {lines[-1]['round']}."
    return f"{weights} The scores are on the validation split, from one run with seed {seed}.\n\n{table}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


# How to load it


def _loading(recipe: Recipe, backbone: Backbone, task: Task, whole: bool) -> str:
    """Python that loads the folder and answers for one sample."""
    if reads_images(recipe.data):
        return image_loading(backbone, task, whole)
    if task.generates:
        return causal_loading(recipe, backbone, whole)
    cut = f"truncation=True, max_length={recipe.data.max_length}"
    place = "this folder, or huggingface_hub.snapshot_download(its name on the Hub)"
    asked = '"a text"'
    if _is_pair(recipe):
        asked = f'{{"text": "a text", "text_pair": {_quoted(pair_separator(backbone.tokenizer) + "another text")}}}'
    answer = "[{'label': ..., 'score': ...}]" if task.classes else "its score is the number"
    ask = f"print(classify({asked}))  # {answer}\n"
    if whole:
        return (
            "from transformers import pipeline\n\n"
            f'folder = "."  # {place}\n'
            f'classify = pipeline("text-classification", folder, {cut})\n{ask}'
        )
    names = ["AutoConfig", "AutoModelForSequenceClassification", "AutoTokenizer", "pipeline"]
    first, options, more = "", "config=config", ""
    if recipe.model.quantize != "none":
        names.insert(3, "BitsAndBytesConfig")
        first, options = "import json\n\n", f"{options}, quantization_config=quantization"
        more = 'quantization = BitsAndBytesConfig.from_dict(json.load(open(f"{folder}/quantization.json")))\n'
    elif isinstance(backbone.source, Path) and backbone.source.suffix == ".gguf":
        options += f", gguf_file={_quoted(backbone.source.name)}"
    return (
        f"{first}from transformers import {', '.join(names)}\n\n"
        f'folder = "."  # {place}\n'
        'config = AutoConfig.from_pretrained(f"{folder}/base_config.json")\n'
        f"{more}model = AutoModelForSequenceClassification.from_pretrained(folder, {options})\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        f'classify = pipeline("text-classification", model=model, tokenizer=tokenizer, {cut})\n{ask}'
    )


def _quoted(text: str) -> str:
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _plain(text: str) -> str:
    """A name from the user's recipe or data as Markdown shows it in a cell: one line, no markup."""
    return "".join({"|": "/", "`": "'", "<": "&lt;"}.get(character, character) for character in printable(text))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

"""The papers' tables of language and of image tasks: their methods, tasks and models. Nothing here reads a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedllm.algorithms import canonical_name

SMALL, SMALL_IMAGES = "minilm", "cnn"  # the models of --small
# The quantities of reporting/paper_table.py.
_SCORES, _SCORES_AND_LOSSES, _COSTS = ("score",), ("score", "train loss"), ("rounds", "minutes")
ALWAYS_THERE = ("bbcnews",)  # a task of every small table of language: a Python package has its texts


@dataclass(frozen=True)
class PaperTable:
    """One table: a row per method, a column per task.

    methods: stable name -> the name that the paper prints. model: the paper's, so that recipes/<task>_<model>.yaml
    is a run. small: the same part of the file name for --small. quantities: what is printed of a cell: a score, with
    the training loss or alone, or the costs of reaching a target. trials: the runs that the paper averages.
    small_model: the model of --small. more: tasks that the small table has beside the paper's. average: whether the
    paper prints the mean of the tasks. variants: of a table whose rows are settings, stable name -> the algorithm and
    its overrides. remark: what to know of the printed numbers.
    """

    title: str
    methods: Mapping[str, str]
    tasks: tuple[str, ...]
    model: str
    small: str
    quantities: tuple[str, ...]
    trials: int
    small_model: str = SMALL
    more: tuple[str, ...] = ALWAYS_THERE
    average: bool = False
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    remark: str = ""

    @property
    def to_target(self) -> bool:
        """Whether the cells are costs of reaching a target."""
        return "score" not in self.quantities

    def overrides(self, method: str) -> tuple[str, ...]:
        """What makes a task's recipe that of a method, as on the command line."""
        algorithm, *settings = self.variants.get(method, (method,))
        return (f"algorithm={algorithm}", *settings)

    def algorithm(self, method: str) -> str:
        """The algorithm of a method or variant."""
        return self.variants.get(method, (method,))[0]

    def method(self, text: str) -> str:
        """The stable name of a method or variant in the paper's spelling or any other; `text` where it is none."""
        known = {spelling: name for name, printed in self.methods.items() for spelling in (name, printed)}
        return known.get(text) or canonical_name(text)

    @property
    def models(self) -> dict[str, str]:
        """Each model that the table can be asked for, with its part of a recipe's file name."""
        return {self.model: self.model, self.small_model: self.small}

    def tasks_of(self, model: str) -> tuple[str, ...]:
        """The tasks with a model: the paper's, and for the small one others as well."""
        return (*self.tasks, *self.more) if model == self.small_model else self.tasks


_FEDADAMW = {
    "fedavg": "FedAvg",
    "scaffold": "SCAFFOLD",
    "fedcm": "FedCM",
    "localadam": "Local Adam",
    "fedadam": "FedAdam",
    "fedlada": "FedLADA",
    "localadamw": "Local AdamW",
    "fedadamw": "FedAdamW",
}
_FADAMGC = {
    "fedavgm": "FedAvg-M",
    "scaffoldm": "SCAFFOLD-M",
    "fedadam": "FedAdam",
    "fedams": "FedAMS",
    "localadam": "LocalAdam",
    "padamfed": "PAdaMFed",
    "fa_nt": "FA-NT",
    "fadamgc": "FAdamGC",
}
_TRACKING = {"localadam": "FedIT-Adam", "fa_nt": "FedIT-AdamET", "fadamgc": "FedIT-AdamGT"}
_TRACKING_GPT2 = {
    "localadam": ("localadam", "algorithm.weight_decay=1e-8"),
    "fa_nt": ("fa_nt", "algorithm.weight_decay=1e-8"),
    "fadamgc": ("fadamgc", "algorithm.weight_decay=1e-8", "algorithm.tracking_init=zero"),
}
_GLUE = ("cola", "rte", "sst2", "qqp", "mrpc", "qnli", "mnli")
_GPT2 = ("20news", "qnli", "qqp", "sst2")
_TRACKING_IMAGES = {
    "fedavg": "FedAvg",
    "scaffold": "SCAFFOLD",
    "localadam": "LocalAdam",
    "fedlada": "FedLADA",
    "fa_nt": "FAdamET",
    "fadamgc": "FAdamGT",
}
_CIFAR100 = ("cifar100", "cifar100_dir06")
_IMAGES = ("cifar10", "cifar100", "tiny_imagenet")


def _images(
    title: str,
    methods: Mapping[str, str],
    tasks: tuple[str, ...],
    model: str,
    small: str,
    quantities: tuple[str, ...] = _SCORES_AND_LOSSES,
) -> PaperTable:
    """A table of image tasks. Its small form has CIFAR-10, whether the paper's has it or not."""
    more = () if "cifar10" in tasks else ("cifar10",)
    trials = 5 if quantities == _SCORES_AND_LOSSES else 4
    return PaperTable(title, methods, tasks, model, small, quantities, trials, SMALL_IMAGES, more)


_PARTS = {
    "A1": ("fedadamw", "algorithm.aggregate_v=false"),
    "A2": ("fedadamw", "algorithm.alpha=0"),
    "A3": ("fedadamw", "algorithm.decay=coupled"),
    "A4": ("fedadamw",),
}
_PART_NAMES = {
    "A1": "A1: no mean of v", "A2": "A2: no Delta_G", "A3": "A3: coupled decay", "A4": "A4: FedAdamW"
}  # fmt: skip
_ALPHAS = {
    f"alpha-{alpha}": ("fedadamw", f"algorithm.alpha={alpha}") for alpha in ("0.00", "0.25", "0.50", "0.75", "1.00")
}
_DECAYS = {
    f"{method}-{decay}": (method, f"algorithm.weight_decay={decay}")
    for method in ("localadam", "localadamw", "fedadamw")
    for decay in ("0.0005", "0.001", "0.005", "0.010", "0.020")
}
_AGGREGATED = {"none": "NoAgg", "m": "Agg-m", "v": "Agg-v", "vm": "Agg-vm", "mean_v": "Agg-mean-v"}
_FORMS = {
    "localadamw": ("localadamw",),
    "algorithm3": ("fedadamw", "algorithm.form=alg3"),
    "algorithm2": ("fedadamw", "algorithm.form=alg2"),
}
_FORM_NAMES = {"localadamw": "Local AdamW", "algorithm3": "FedAdamW, Alg. 3", "algorithm2": "FedAdamW, Alg. 2"}
_BETAS = {
    "localadam": ("localadam", "algorithm.betas=[0.9, 0.99]"),
    **{f"fa_nt-{beta}": ("fa_nt", f"algorithm.betas=[0.9, {beta}]") for beta in ("0", "0.99")},
    **{f"fadamgc-{beta}": ("fadamgc", f"algorithm.betas=[0.9, {beta}]") for beta in ("0", "0.3", "0.7", "0.99")},
}


def _ablation(
    number: str,
    names: Mapping[str, str],
    variants: Mapping[str, tuple[str, ...]],
    remark: str = "",
    model: str = "vit_tiny",
    tasks: tuple[str, ...] = ("cifar100",),
) -> PaperTable:
    """A table of the FedAdamW paper whose rows are settings, on CIFAR-100."""
    title = f"FedAdamW paper, Table {number}"
    return replace(_images(title, names, tasks, model, "cnn"), variants=variants, remark=remark)


def _named(variants: Mapping[str, tuple[str, ...]], sign: str) -> dict[str, str]:
    """The names of rows such as fedadamw-0.01: "FedAdamW <sign> 0.01"."""
    known = {**_FADAMGC, **_FEDADAMW}
    parts = {name: name.partition("-") for name in variants}
    return {
        name: f"{known[method]} {sign} {value}" if value else known[method]
        for name, (method, _, value) in parts.items()
    }


TABLES = {
    "fedadamw-table3": PaperTable(
        "FedAdamW paper, Table 3", _FEDADAMW, _GLUE, "roberta", "minilm", _SCORES, 5, average=True
    ),
    "fadamgc-table2": PaperTable("FAdamGC paper, Table 2", _FADAMGC, _GPT2, "gpt2", "gc_minilm", _COSTS, 4),
    "tracking-table2": PaperTable(
        "Parameter tracking paper, Table 2", _TRACKING, _GPT2, "gpt2", "gc_minilm", _COSTS, 4,
        variants=_TRACKING_GPT2,
        remark="Unlike the FAdamGC paper, this one has a weight decay, and tracking starts from 0.",
    ),
    "fedadamw-table1": _images("FedAdamW paper, Table 1, ResNet-18", _FEDADAMW, _CIFAR100, "resnet18", "cnn"),
    "fedadamw-table1-vit": _images("FedAdamW paper, Table 1, ViT-Tiny", _FEDADAMW, _CIFAR100, "vit_tiny", "cnn"),
    "fedadamw-table2": _images("FedAdamW paper, Table 2", _FEDADAMW, ("cifar100", "tiny_imagenet"), "swin", "cnn"),
    "fadamgc-table2-images": replace(
        _images("FAdamGC paper, Table 2, images", _FADAMGC, _IMAGES, "gc_resnet18", "gc_cnn", (*_COSTS, "GiB")),
        remark="GiB, which a client sends and receives, are those of Table 7, which has no PAdaMFed.",
    ),
    "tracking-table1": replace(
        _images(
            "Parameter tracking paper, Table 1", _TRACKING_IMAGES, _IMAGES, "pt_resnet18", "gc_cnn",
            ("rounds", "vectors"),
        ),
        remark="Vectors are the model-sized vectors that a client sends and receives.",
    ),
    "fedadamw-table4": _ablation("4", _PART_NAMES, _PARTS),
    "fedadamw-table5": _ablation(
        "5", {name: name.replace("-", " ") for name in _ALPHAS}, _ALPHAS,
        "alpha 0 is A2 of Table 4, which prints 37.42 and a training loss of 1.621 for it.",
    ),
    "fedadamw-table6": replace(_ablation("6", _named(_DECAYS, "lambda"), _DECAYS), quantities=_SCORES),
    "fedadamw-table7": _ablation(
        "7", _AGGREGATED, {name: ("localadamw", f"algorithm.aggregate={name}") for name in _AGGREGATED}
    ),
    "fedadamw-table11": _ablation("11, ResNet-18", _FORM_NAMES, _FORMS, "", "resnet18", _CIFAR100),
    "fedadamw-table11-vit": _ablation("11, ViT-Tiny", _FORM_NAMES, _FORMS, "", "vit_tiny", _CIFAR100),
    "fadamgc-table3": replace(
        _images("FAdamGC paper, Table 3", _named(_BETAS, "beta2"), _IMAGES, "gc_resnet18", "gc_cnn", _COSTS),
        variants=_BETAS,
        remark="Some printed deviations of minutes repeat those of the rounds.",
    ),
}  # fmt: skip

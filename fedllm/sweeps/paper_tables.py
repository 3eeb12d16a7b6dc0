"""The papers' tables of language and of image tasks: their methods, tasks and models. Nothing here reads a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SMALL, SMALL_IMAGES = "minilm", "cnn"  # the models of --small
ALWAYS_THERE = ("bbcnews",)  # a task of every small table of language: a Python package has its texts


@dataclass(frozen=True)
class PaperTable:
    """One table: a row per method, a column per task.

    methods: stable name -> the name that the paper prints. model: the paper's, so that recipes/<task>_<model>.yaml is a
    run. small: the same part of the file name for --small. to_target: whether the paper prints rounds (and minutes) to
    a target; else it prints scores. trials: the runs that the paper averages. small_model: the model of --small.
    more: tasks that the small table has beside the paper's. average: whether the paper prints the mean of the tasks.
    """

    title: str
    methods: Mapping[str, str]
    tasks: tuple[str, ...]
    model: str
    small: str
    to_target: bool
    trials: int
    small_model: str = SMALL
    more: tuple[str, ...] = ALWAYS_THERE
    average: bool = False

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


def _images(title: str, methods: Mapping[str, str], tasks: tuple[str, ...], model: str, small: str) -> PaperTable:
    """A table of image tasks. Its small form has CIFAR-10, whether the paper's has it or not."""
    more = () if "cifar10" in tasks else ("cifar10",)
    target = small.startswith("gc_")
    return PaperTable(title, methods, tasks, model, small, target, 4 if target else 5, SMALL_IMAGES, more)


TABLES = {
    "fedadamw-table3": PaperTable(
        "FedAdamW paper, Table 3", _FEDADAMW, _GLUE, "roberta", "minilm", False, 5, average=True
    ),
    "fadamgc-table2": PaperTable("FAdamGC paper, Table 2", _FADAMGC, _GPT2, "gpt2", "gc_minilm", True, 4),
    "tracking-table2": PaperTable("Parameter tracking paper, Table 2", _TRACKING, _GPT2, "gpt2", "gc_minilm", True, 4),
    "fedadamw-table1": _images("FedAdamW paper, Table 1, ResNet-18", _FEDADAMW, _CIFAR100, "resnet18", "cnn"),
    "fedadamw-table1-vit": _images("FedAdamW paper, Table 1, ViT-Tiny", _FEDADAMW, _CIFAR100, "vit_tiny", "cnn"),
    "fedadamw-table2": _images("FedAdamW paper, Table 2", _FEDADAMW, ("cifar100", "tiny_imagenet"), "swin", "cnn"),
    "fadamgc-table2-images": _images("FAdamGC paper, Table 2, images", _FADAMGC, _IMAGES, "gc_resnet18", "gc_cnn"),
    "tracking-table1": _images("Parameter tracking paper, Table 1", _TRACKING_IMAGES, _IMAGES, "pt_resnet18", "gc_cnn"),
}

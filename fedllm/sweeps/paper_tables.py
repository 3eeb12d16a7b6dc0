"""The papers' tables of language tasks: which methods, tasks and models each has. Nothing here reads a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SMALL = "minilm"  # the model of --small
ALWAYS_THERE = "bbcnews"  # a task of every small table: a Python package has its texts


@dataclass(frozen=True)
class PaperTable:
    """One table: a row per method, a column per task.

    methods: stable name -> the name that the paper prints. model: the paper's, so that recipes/<task>_<model>.yaml is a
    run. small: the same part of the file name for --small. to_target: whether the paper prints rounds (and minutes) to
    a target; else it prints scores. trials: the runs that the paper averages.
    """

    title: str
    methods: Mapping[str, str]
    tasks: tuple[str, ...]
    model: str
    small: str
    to_target: bool
    trials: int

    @property
    def models(self) -> dict[str, str]:
        """Each model that the table can be asked for, with its part of a recipe's file name."""
        return {self.model: self.model, SMALL: self.small}

    def tasks_of(self, model: str) -> tuple[str, ...]:
        """The tasks with a model: the paper's, and for the small one another that needs no hub."""
        return (*self.tasks, ALWAYS_THERE) if model == SMALL else self.tasks


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

TABLES = {
    "fedadamw-table3": PaperTable("FedAdamW paper, Table 3", _FEDADAMW, _GLUE, "roberta", "minilm", False, 5),
    "fadamgc-table2": PaperTable("FAdamGC paper, Table 2", _FADAMGC, _GPT2, "gpt2", "gc_minilm", True, 4),
    "tracking-table2": PaperTable("Parameter tracking paper, Table 2", _TRACKING, _GPT2, "gpt2", "gc_minilm", True, 4),
}

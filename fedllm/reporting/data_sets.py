"""The runs by data set, and a name for each data set that no other one has."""

from __future__ import annotations

from collections.abc import Sequence

from fedllm.results.data_digests import data_settings
from fedllm.results.names import printable, setting_text
from fedllm.results.run_record import RunRecord


def by_data_set(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """The runs of each data set, by its name, in the order of their first runs.

    Runs have the same data set if their scores were measured on the same validation samples, whatever the files are
    called. Where no digest tells, equal settings of the data count as the same validation samples.
    """
    members: dict[str, list[RunRecord]] = {}
    for run in runs:
        members.setdefault(run.data.get("validation") or data_settings(run, "max_train"), []).append(run)
    return dict(zip(_names([_shown(found) for found in members.values()]), members.values(), strict=True))


def _shown(runs: Sequence[RunRecord]) -> RunRecord:
    """The run that names a data set: the first with data.title, or the first."""
    return next((run for run in runs if run.recipe["data"].get("title")), runs[0])


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run's data: its title, name or file; where these are alike, with more of the file's folders, then
    with the settings of the data that differ, then with the digest, then with a number."""
    names = _shortest_paths(runs)
    for details in (_differing_settings, _digests, _numbers):
        texts = details(runs, names)
        pairs = list(zip(names, texts, strict=True))
        names = [f"{name} ({text})" if names.count(name) > 1 and text else name for name, text in pairs]
    return names


def _shortest_paths(runs: Sequence[RunRecord]) -> list[str]:
    """The last parts of each path: as many as it takes to tell it from the others, if it can be told."""
    paths = [run.data_path for run in runs]
    lengths = [1 + run.task.count("/") if len(path) > 1 else 1 for run, path in zip(runs, paths, strict=True)]
    while True:
        names = ["/".join(path[-length:]) for path, length in zip(paths, lengths, strict=True)]
        called: dict[str, set[tuple[str, ...]]] = {}
        for name, path in zip(names, paths, strict=True):
            called.setdefault(name, set()).add(path)
        longer = [i for i, name in enumerate(names) if len(called[name]) > 1 and lengths[i] < len(paths[i])]
        if not longer:
            return names
        for i in longer:
            lengths[i] += 1


def _differing_settings(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    """For each run the settings of the data in which the runs of its name differ."""
    texts = []
    for run, name in zip(runs, names, strict=True):
        alike = [other.recipe["data"] for other, its in zip(runs, names, strict=True) if its == name]
        keys = [key for key in run.recipe["data"] if len({setting_text(data.get(key)) for data in alike}) > 1]
        pairs = [f"{key}={setting_text(run.recipe['data'][key])}" for key in keys if key != "title"]
        texts.append(printable(", ".join(pairs)))
    return texts


def _digests(runs: Sequence[RunRecord], _: Sequence[str]) -> list[str]:
    return [f"sha256 {run.data['validation'][:8]}" if run.data else "" for run in runs]


def _numbers(runs: Sequence[RunRecord], _: Sequence[str]) -> list[str]:
    return [str(number) for number in range(1, len(runs) + 1)]

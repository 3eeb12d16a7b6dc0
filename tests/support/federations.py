"""Deployed runs on one machine: a simulation's clients as sites with files of their own."""

from __future__ import annotations

import csv
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from conftest import write_rows

from fedllm.config.recipe import Recipe, load_recipe
from fedllm.deployment.link import Kind, Reply
from fedllm.deployment.site_settings import Policy, SiteSettings
from fedllm.experiment.run import RunResult, run
from fedllm.experiment.serve import serve
from fedllm.experiment.site import SiteWorker, open_site

DEPLOYMENT = "deployment={sites: 3, deadline: 60, ask_again: 30, patience: 60}"
_ONE_AT_A_TIME = threading.Lock()  # the threads of a process share torch's random generator
TIMED = {"seconds", "simulated_seconds", "eval_seconds", "missing", "sites"}


def split_rows(source: Path, column: str, folder: Path) -> list[Path]:
    """A file for each value of a column, in the order of scheme by_column; .csv or .jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = source.read_text().splitlines(keepends=True)
    rows = list(csv.DictReader(lines)) if source.suffix == ".csv" else [json.loads(line) for line in lines]
    head, body = (lines[:1], lines[1:]) if source.suffix == ".csv" else ([], lines)
    values = sorted({row[column] for row in rows})
    paths = [folder / f"{value}{source.suffix}" for value in values]
    for value, path in zip(values, paths, strict=True):
        path.write_text("".join(head + [line for line, row in zip(body, rows, strict=True) if row[column] == value]))
    return paths


def three_sites(tiny: Path, folder: Path) -> Path:
    """The tiny federation with three clients by column `site`, 12 samples each, and a file for each in `sites`."""
    rows = write_rows(folder / "train.csv", 60, seed=0).read_text().splitlines()
    kept = [row for row in rows if not row.endswith(("site3", "site4"))]
    (folder / "train.csv").write_text("\n".join(kept) + "\n")
    split_rows(folder / "train.csv", "site", folder / "sites")
    recipe = (tiny / "recipe.yaml").read_text().replace(str(tiny / "train.csv"), str(folder / "train.csv"))
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def settings(folder: Path, train: Path, name: str, **keys: Any) -> SiteSettings:
    """The settings of a site that allows everything."""
    return SiteSettings(
        name=name, server="127.0.0.1:18000", insecure=True, train=train, state=folder / name, threads=1, device="cpu",
        allow=keys.pop("allow", Policy(min_sites=None)), **keys,
    )  # fmt: skip


class ThreadLink:
    """A link to workers of this process: one thread per site. `online` has the lives of those that run now.

    spoil(site, kind, answer): what comes of an answer on its way, None for nothing."""

    def __init__(self, sites: Sequence[SiteSettings]) -> None:
        self.settings = list(sites)
        self.workers: dict[int, SiteWorker] = {}
        self.asked: list[tuple[int, Kind]] = []
        self.spoil: Callable[[int, Kind, bytes], bytes | None] = lambda site, kind, answer: answer
        self._orders: dict[int, queue.Queue[tuple[str, Kind, bytes] | None]] = {}
        self._replies: queue.Queue[Reply] = queue.Queue()
        for site in range(len(sites)):
            self.restart(site)

    def restart(self, site: int) -> None:
        """A new process of the site: what it knows is in its folder."""
        self.end(site)
        self.workers[site], self._orders[site] = open_site(self.settings[site]), queue.Queue()
        arguments = (site, self.workers[site], self._orders[site])
        threading.Thread(target=self._work, args=arguments, daemon=True).start()

    def end(self, site: int) -> None:
        """The site cannot be reached any more."""
        if self.workers.pop(site, None):
            self._orders.pop(site).put(None)

    def _work(self, site: int, worker: SiteWorker, orders: queue.Queue[tuple[str, Kind, bytes] | None]) -> None:
        while order := orders.get():
            name, kind, body = order
            with _ONE_AT_A_TIME:
                answer = self.spoil(site, kind, worker.handle(kind, body))
            if answer is not None:
                self._replies.put(Reply(name, site, answer))

    def online(self) -> dict[int, str]:
        return {site: worker.life for site, worker in self.workers.items()}

    def send(self, site: int, kind: Kind, body: bytes, seconds: float) -> str:
        self.asked.append((site, kind))
        name = f"request {len(self.asked)}"
        if site in self._orders:
            self._orders[site].put((name, kind, body))
        return name

    def replies(self) -> list[Reply]:
        found = []
        while not self._replies.empty():
            found.append(self._replies.get())
        return found

    def close(self) -> None:
        for site in list(self.workers):
            self.end(site)


def written(path: Path, recipe: Mapping[str, Any]) -> Path:
    """A recipe's file."""
    path.write_text(yaml.safe_dump(dict(recipe)))
    return path


def simulated(recipe: Path, overrides: Sequence[str], folder: Path) -> RunResult:
    return run(load_recipe(recipe, [*overrides, f"run.dir={folder}"]))


def deployed(recipe: Path, overrides: Sequence[str], folder: Path, link: Any) -> RunResult:
    return serve(recipe_of(recipe, overrides, folder), link)


def recipe_of(recipe: Path, overrides: Sequence[str], folder: Path) -> Recipe:
    return load_recipe(recipe, [DEPLOYMENT, *overrides, f"run.dir={folder}"])


def numbers(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what real sites and clocks change."""
    return [{name: value for name, value in line.items() if name not in TIMED} for line in metrics]

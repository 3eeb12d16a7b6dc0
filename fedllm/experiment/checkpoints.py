"""Checkpoints: safetensors and JSON files with digests, in a folder that is written under a temporary name and renamed.

checkpoints/000010/manifest.json                 round, facts of the run, sha256 of every other file
                   server.safetensors            x, the server's vectors, and buffers where the problem has them
                   clients/7.safetensors         one client's vectors; a hard link of ClientFiles' own file
                   metrics.jsonl                 the metrics up to this round
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedllm.common.errors import RunError, UserError
from fedllm.common.files import digest, link, sync, write_tensors, write_text
from fedllm.common.tensors import State
from fedllm.experiment.run_facts import RunFacts
from fedllm.federation.client_states import VectorFile
from fedllm.federation.setup import BUFFERS

if TYPE_CHECKING:
    from fedllm.federation.state import FederationState

_MANIFEST, _SERVER, _METRICS = "manifest.json", "server.safetensors", "metrics.jsonl"
_KEEP = 2
_THREADS = 16  # files read or flushed at once; most of the time is disk latency


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint. clients: the clients' files. buffers [b]: None for a problem without them."""

    round: int
    x: Tensor
    server: State
    clients: dict[int, VectorFile]
    metrics: list[dict[str, Any]]
    facts: RunFacts
    buffers: Tensor | None = None

    def restore(self, federation: FederationState) -> None:
        """Copies the snapshot's state into a new federation. Raises UserError if it does not fit."""
        pairs = [("x", federation.x, self.x), *_pairs(federation.server, self.server)]
        if federation.buffers is not None:
            pairs.append((BUFFERS, federation.buffers, self.buffers))
        for name, ours, theirs in pairs:
            if theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                found = "nothing" if theirs is None else f"{list(theirs.shape)} {theirs.dtype}"
                raise UserError(
                    f"checkpoint of round {self.round}: tensor '{name}': found {found}, expected {list(ours.shape)} "
                    f"{ours.dtype}; it belongs to another model or algorithm: choose another run.dir"
                )
        device = federation.x.device
        federation.round = self.round
        federation.x = self.x.to(device)
        federation.server = {name: value.to(device) for name, value in self.server.items()}
        federation.buffers = None if self.buffers is None else self.buffers.to(device)
        federation.clients.commit(self.clients)


def _pairs(ours: State, theirs: State) -> list[tuple[str, Tensor, Tensor | None]]:
    return [(name, value, theirs.get(name)) for name, value in ours.items()]


class Checkpoints:
    """The checkpoints of one run, in `folder`. warn(text) is called for each damaged checkpoint that is skipped."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder, self._warn = folder, warn

    def save(
        self, federation: FederationState, metrics: list[dict[str, Any]], facts: RunFacts, best: int | None = None
    ) -> Path:
        """Writes the state after federation.round rounds, and removes all but the two newest checkpoints and that of
        round `best`.

        Raises RunError if it cannot be written (for example on a full disk). Earlier checkpoints then stay intact.
        """
        final = self.folder / f"{federation.round:06d}"
        aside = self.folder / f".writing-{os.getpid()}"
        previous = next(iter(self._newest()), None)
        try:
            for left in self.folder.glob(".writing-*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            (aside / "clients").mkdir(parents=True)
            files = self._write(aside, federation, metrics, previous)
            manifest = {"format": 1, "round": federation.round, "facts": facts.to_json(), "files": files}
            write_text(aside / _MANIFEST, json.dumps(manifest, indent=1))
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(
                f"the checkpoint of round {federation.round} could not be written to {self.folder}: {error}; make room"
            ) from error
        for old in self._newest()[_KEEP:]:
            if int(old.name) != best:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def latest(self) -> Snapshot | None:
        """The newest intact checkpoint, or None. Incomplete or altered ones are skipped, with a call of `warn`."""
        return self._first_intact(self._newest())

    def of(self, round: int) -> Snapshot | None:
        """The checkpoint of a round, or None if there is none or, with a call of `warn`, if it is damaged."""
        return self._first_intact([folder for folder in self._newest() if int(folder.name) == round])

    def any(self) -> bool:
        """Whether there is a checkpoint, intact or not."""
        return bool(self._newest())

    def kept(self) -> str:
        """Where a run that failed goes on, for its error."""
        if not (newest := self._newest()):
            return "There is no checkpoint yet: the same command starts from round 1"
        return f"The checkpoint of round {int(newest[0].name)} is intact: the same command goes on from it"

    def _first_intact(self, folders: Sequence[Path]) -> Snapshot | None:
        for folder in folders:
            try:
                return _load(folder)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                self._warn(f"checkpoint {folder} is damaged ({error}); it is not used")
        return None

    def _newest(self) -> list[Path]:
        found = self.folder.glob("[0-9]*") if self.folder.is_dir() else []
        numbered = (path for path in found if path.is_dir() and path.name.isdigit())
        return sorted(numbered, key=lambda path: int(path.name), reverse=True)

    def _write(
        self, aside: Path, federation: FederationState, metrics: list[dict[str, Any]], previous: Path | None
    ) -> dict[str, str]:
        """Writes all files but the manifest; returns their digests by relative path."""
        server = {"x": federation.x, **{f"server/{name}": value for name, value in federation.server.items()}}
        if federation.buffers is not None:
            server[BUFFERS] = federation.buffers
        files = {_SERVER: write_tensors(aside / _SERVER, server)}
        text = "".join(json.dumps(line) + "\n" for line in metrics)
        files[_METRICS] = write_text(aside / _METRICS, text)
        for client, kept in federation.clients.known().items():
            assert isinstance(kept, VectorFile), "a run keeps its clients' vectors in files"
            name = f"clients/{client}.safetensors"
            link(kept.path, aside / name)
            files[name] = kept.sha256

        def settle(name: str) -> None:
            if previous is None or not _same_file(previous / name, aside / name):
                sync(aside / name)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(settle, files))
        return files


def _load(folder: Path) -> Snapshot:
    manifest = _read_manifest(folder / _MANIFEST)
    files: dict[str, str] = manifest["files"]
    for name in files:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} leads out of the checkpoint")
        if not path.is_file():
            raise ValueError(f"{name} is missing")
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(digest, (folder / name for name in files))
    if damaged := [name for name, now in zip(files, found, strict=True) if now != files[name]]:
        raise ValueError(f"{damaged[0]} does not match its digest")
    tensors = load_file(folder / _SERVER)
    server = {name.removeprefix("server/"): value for name, value in tensors.items() if name.startswith("server/")}
    clients = {
        int(Path(name).stem): VectorFile(folder / name, files[name]) for name in files if name.startswith("clients/")
    }
    metrics = [json.loads(line) for line in (folder / _METRICS).read_text().splitlines()]
    facts, buffers = RunFacts.from_json(manifest["facts"]), tensors.get(BUFFERS)
    return Snapshot(int(manifest["round"]), tensors["x"], server, clients, metrics, facts, buffers)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    for name in ("round", "facts", "files"):
        if not isinstance(manifest, dict) or name not in manifest:
            raise ValueError(f"{path.name} has no '{name}'")
    return cast(dict[str, Any], manifest)


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False

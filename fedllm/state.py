"""Checkpoints: written aside and renamed, every file with its digest; safetensors and JSON only.

checkpoints/000010/manifest.json                 round, facts of the run, sha256 of every other file
                   server.safetensors            x and the server's vectors
                   clients/7.safetensors         one client's vectors; a hard link while they have not changed
                   metrics.jsonl                 the metrics up to this round
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedllm.algorithms.base import State
from fedllm.errors import RunError, UserError

if TYPE_CHECKING:
    from fedllm.rounds import Federation

_MANIFEST, _SERVER, _METRICS = "manifest.json", "server.safetensors", "metrics.jsonl"
_KEEP = 2
_WRITERS = 16  # files on their way to the disk at once: what takes time is its word that one is there


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds. facts: what the run chose for itself and must choose again, such as the cohort size."""

    round: int
    x: Tensor
    server: State
    clients: dict[int, State]
    metrics: list[dict[str, Any]]
    facts: dict[str, Any]

    def restore(self, federation: Federation) -> None:
        """Puts the snapshot's state into a federation fresh from `rounds.start`. UserError where it does not fit."""
        for name, ours, theirs in [("x", federation.x, self.x), *_pairs(federation.server, self.server)]:
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
        for client, state in self.clients.items():
            federation.clients.put([client], {name: value[None] for name, value in state.items()})
        federation.clients.changed.clear()


def _pairs(ours: State, theirs: State) -> list[tuple[str, Tensor, Tensor | None]]:
    return [(name, value, theirs.get(name)) for name, value in ours.items()]


class Checkpoints:
    """The checkpoints of one run, in `folder`. warn(text): called for a damaged one that is passed over."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder, self._warn = folder, warn

    def save(self, federation: Federation, metrics: list[dict[str, Any]], facts: dict[str, Any]) -> Path:
        """Writes the state after federation.round rounds; the two newest checkpoints are kept.

        Raises RunError where it cannot be written (a full disk); earlier checkpoints are then intact.
        """
        final = self.folder / f"{federation.round:06d}"
        aside = self.folder / f".writing-{os.getpid()}"
        previous = next(iter(self._newest()), None)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            (aside / "clients").mkdir(parents=True)
            files = self._write(aside, federation, metrics, previous)
            manifest = {"format": 1, "round": federation.round, "facts": facts, "files": files}
            _write_text(aside / _MANIFEST, json.dumps(manifest, indent=1))
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            _sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            kept = f"the checkpoint of round {int(previous.name)} is intact" if previous else "there is no earlier one"
            raise RunError(
                f"the checkpoint of round {federation.round} could not be written to {self.folder}: {error}; {kept}. "
                f"Make room and start the same command again"
            ) from error
        federation.clients.changed.clear()
        for old in self._newest()[_KEEP:]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def latest(self) -> Snapshot | None:
        """The newest checkpoint that is whole, or None. A torn or altered one is named by `warn` and passed over."""
        for folder in self._newest():
            try:
                return _load(folder)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                self._warn(f"checkpoint {folder} is damaged ({error}); trying the one before it")
        return None

    def _newest(self) -> list[Path]:
        found = self.folder.glob("[0-9]*") if self.folder.is_dir() else []
        return sorted((path for path in found if path.is_dir() and path.name.isdigit()), reverse=True)

    def _write(
        self, aside: Path, federation: Federation, metrics: list[dict[str, Any]], previous: Path | None
    ) -> dict[str, str]:
        """Writes all files but the manifest; returns their digests by relative path."""
        server = {"x": federation.x, **{f"server/{name}": value for name, value in federation.server.items()}}
        files = {_SERVER: _write_tensors(aside / _SERVER, server)}
        text = "".join(json.dumps(line) + "\n" for line in metrics)
        files[_METRICS] = _write_text(aside / _METRICS, text)
        before: dict[str, str] = {}
        if previous is not None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                before = json.loads((previous / _MANIFEST).read_text())["files"]
        new: dict[str, State] = {}
        for client, state in federation.clients.known().items():
            name = f"clients/{client}.safetensors"
            if client not in federation.clients.changed and name in before and previous is not None:
                with contextlib.suppress(OSError):
                    os.link(previous / name, aside / name)
                    files[name] = before[name]
                    continue
            new[name] = state
        with ThreadPoolExecutor(_WRITERS) as pool:
            digests = pool.map(_write_tensors, (aside / name for name in new), new.values())
            return files | dict(zip(new, digests, strict=True))


def _load(folder: Path) -> Snapshot:
    manifest = json.loads((folder / _MANIFEST).read_text())
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} leads out of the checkpoint")
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if _digest(path) != digest:
            raise ValueError(f"{name} does not match its digest")
    tensors = load_file(folder / _SERVER)
    server = {name.removeprefix("server/"): value for name, value in tensors.items() if name.startswith("server/")}
    names = [name for name in manifest["files"] if name.startswith("clients/")]
    clients = {int(Path(name).stem): load_file(folder / name) for name in names}
    metrics = [json.loads(line) for line in (folder / _METRICS).read_text().splitlines()]
    return Snapshot(int(manifest["round"]), tensors["x"], server, clients, metrics, manifest["facts"])


def _write_tensors(path: Path, tensors: State) -> str:
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
    _sync(path)
    return _digest(path)


def _write_text(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    _sync(path)
    return hashlib.sha256(text.encode()).hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Writes a file aside and renames it, so that it is never half written. RunError where it cannot be written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_text(aside, text)
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with _descriptor(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

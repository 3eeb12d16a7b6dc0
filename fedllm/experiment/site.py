"""The process of one site: it stays, holds data, model and state, and answers the server's orders."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeVar

from fedllm.common.console import say, warn
from fedllm.common.errors import RunError, UserError
from fedllm.deployment.local import listen_as
from fedllm.deployment.site_messages import Announcement, EvaluateOrder, Failure, Status, TrainOrder
from fedllm.deployment.site_settings import SiteSettings
from fedllm.experiment.site_run import SiteRun

T = TypeVar("T")
_UNKNOWN = "has not been told of this run since it was started"


class RefusalError(UserError):
    """An order that this site does not follow, through the server's mistake. again: see Failure."""

    def __init__(self, message: str, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


def open_site(settings: SiteSettings) -> SiteWorker:
    """The worker of a site. Data and model are read when a run is announced.

    Raises UserError if the folder for its state cannot be used."""
    try:
        settings.state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"state: {settings.state}: cannot be made ({error.strerror}); name another folder") from error
    return SiteWorker(settings)


def stay(settings: SiteSettings, socket: Path, stop: threading.Event | None = None) -> None:
    """The process of a site: answers orders at `socket` until `stop` is set; see resident.listen."""
    worker = open_site(settings)
    listen_as(socket, worker.life, worker.handle, stop)


class SiteWorker:
    """Answers the server's orders, one after the other. life: differs between the processes of a site."""

    def __init__(self, settings: SiteSettings) -> None:
        self.settings, self.life = settings, uuid.uuid4().hex
        self._run: SiteRun | None = None
        self._announced = ""  # digest of the announcement of `_run`
        self._lock = threading.Lock()
        self._doing = "waiting for a run"
        self._handlers: dict[str, Callable[[bytes], bytes]] = {
            "announce": self._join,
            "train": self._train,
            "evaluate": self._evaluate,
        }

    def handle(self, kind: str, body: bytes) -> bytes:
        """The answer to an order. Never raises: what fails is answered with a Failure."""
        if kind == "status":
            return Status(self.settings.name, self.life, self._doing).to_bytes()
        with self._lock:
            try:
                if kind not in self._handlers:
                    raise RefusalError(f"found an order '{kind[:40]}', expected one of {', '.join(self._handlers)}")
                return self._handlers[kind](body)
            except RefusalError as error:
                return self._failed(kind, str(error), "server", error.again)
            except (UserError, RunError) as error:
                return self._failed(kind, str(error), "site")
            except Exception as error:  # of a library; its text may show data and stays here
                warn(f"{kind}: {type(error).__name__}: {error}")
                return self._failed(kind, f"{type(error).__name__}; the site's own log says more", "site")
            finally:
                self._doing = "waiting for an order" if self._run else "waiting for a run"

    def _failed(self, kind: str, error: str, whose: Literal["site", "server"], again: bool = False) -> bytes:
        if not again:
            warn(f"{kind}: {error}")
        return Failure(error, whose, again).to_bytes()

    def _join(self, body: bytes) -> bytes:
        digest = hashlib.sha256(body).hexdigest()
        if self._run is None or digest != self._announced:
            told = _read(Announcement.from_bytes, body)
            self._doing, self._run = "reading data and model", None
            self._require_allowed(told)
            folder = self.settings.state / told.run
            self._run, self._announced = SiteRun(told, self.settings, folder), digest
        joined = self._run.joined
        told = self._run.told
        say(f"joined run {told.run[:8]} as site {told.site} with {joined.samples:,} samples; waiting")
        return joined.to_bytes()

    def _require_allowed(self, told: Announcement) -> None:
        """Raises UserError for a run that this site does not take part in, before anything of it is loaded."""
        if (own := version("fedllm")) != told.version:
            raise UserError(
                f"{self.settings.name}: fedllm {own} here, {told.version} at the server; install the server's version"
            )
        sections = {name: keys or {} for name, keys in told.recipe.items()}
        algorithm, model = sections.get("algorithm", {}).get("name"), sections.get("model", {}).get("name")
        rounds = sections.get("federation", {}).get("rounds")
        say(f"announced: {algorithm} on {model}, {told.sites} sites, {rounds} rounds")
        if why := self.settings.allow.refusal(sections, told.sites):
            raise UserError(f"{self.settings.name}: {why}")
        if told.site >= told.sites:
            raise RefusalError(f"site: found {told.site}, expected 0 to {told.sites - 1}")

    def _current(self, run: str) -> SiteRun:
        if self._run is None or self._run.told.run != run:
            raise RefusalError(f"{self.settings.name}: {_UNKNOWN}", again=True)
        return self._run

    def _train(self, body: bytes) -> bytes:
        order = _read(TrainOrder.from_bytes, body)
        self._doing = f"training in round {order.broadcast.round + 1}"
        return self._current(order.run).train(body, order)

    def _evaluate(self, body: bytes) -> bytes:
        order = _read(EvaluateOrder.from_bytes, body)
        self._doing = f"evaluating after round {order.round}"
        return self._current(order.run).evaluate(order)


def _read(read: Callable[[bytes], T], body: bytes) -> T:
    """What the bytes say. Raises RefusalError if they are no such message."""
    try:
        return read(body)
    except UserError as error:
        raise RefusalError(str(error)) from error

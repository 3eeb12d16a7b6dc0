"""Flower's simulation engine as what trains the clients of a run (`run.engine: flower`); all else is as without it.

Flower and Ray are an environment of their own, .venv/flower-simulation. A process of it runs Flower's simulation
(flower_simulation), which this process reaches over a local socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedllm.aggregation.uploads import Uploads
from fedllm.common.console import say
from fedllm.common.errors import RunError, UserError
from fedllm.common.tensors import State
from fedllm.config.recipe import Recipe
from fedllm.deployment.flower_processes import bound, log_tail
from fedllm.deployment.grid_link import GridLink
from fedllm.experiment.build import ReadCache
from fedllm.experiment.flower_client import inputs_of, order_bytes, read_answer
from fedllm.experiment.job import Job
from fedllm.experiment.machine import usable_cores
from fedllm.experiment.session import Session
from fedllm.experiment.training import ThisMachine
from fedllm.federation.executor import Executor
from fedllm.federation.local_training import Progress, Trained, local_steps, rows_of
from fedllm.federation.rounds import Plan, RoundReport, run_round
from fedllm.federation.sampling import deal
from fedllm.federation.setup import BUFFERS, PERSONAL, Setup
from fedllm.federation.state import FederationState

_START = 300.0  # seconds in which Ray must have started all clients
_END = 30.0  # seconds in which Flower and Ray end by themselves
_POLL = 0.02  # seconds between looks for answers
_PROGRAM = "fedllm.experiment.flower_simulation"


def simulation_python() -> Path:
    """The Python with Flower's simulation engine: FEDLLM_FLOWER_SIMULATION, or that of `make flower-simulation`.

    Raises UserError if there is none."""
    given = os.environ.get("FEDLLM_FLOWER_SIMULATION")
    place = Path(given).expanduser() if given else Path(sys.prefix) / "flower-simulation" / "bin" / "python"
    if not place.is_file():
        raise UserError(
            f"run.engine: found flower, but Flower's simulation engine is not installed (looked for {place}); run: "
            "make flower-simulation, or name the Python that has it in FEDLLM_FLOWER_SIMULATION"
        )
    return place


def require_simulable(recipe: Recipe, executor: Executor) -> None:
    """Raises UserError, naming the key, for what Flower's engine does not do here."""
    simulation_python()
    expected = "or set run.engine: fedllm"
    if executor.size > 1:
        raise UserError(f"run.engine: found flower with {executor.size} processes of a launcher; start one, {expected}")
    if recipe.privacy is not None and recipe.privacy.level == "sample":
        raise UserError(f"privacy.level: found sample with run.engine: flower; {expected}")
    if recipe.takes_turns:
        raise UserError(f"lora.train: found turns with run.engine: flower, expected AB or B; {expected}")
    if recipe.load_algorithm().needs_full_gradient():
        raise UserError(
            f"algorithm.tracking_init: found gradient with run.engine: flower, expected zero: the pass over all data "
            f"before round 1 is not made by Flower's clients; {expected}"
        )
    if recipe.run.device == "cuda" or (recipe.run.device == "auto" and torch.cuda.is_available()):
        raise UserError(
            f"run.device: found {recipe.run.device}, expected cpu with run.engine: flower on a machine with a GPU: its "
            f"clients train on CPUs; {expected}"
        )


@contextlib.contextmanager
def flower_simulation() -> Iterator[FlowerSimulation]:
    """A FlowerSimulation, whose processes end with this context."""
    source = FlowerSimulation()
    try:
        yield source
    finally:
        source.close()


class FlowerSimulation(ThisMachine):
    """Rounds whose clients train in Flower's simulation; see RoundSource. This process does all else of a round."""

    def __init__(self) -> None:
        self._clients: _Clients | None = None
        self._inputs: dict[str, str] = {}
        self._steps: dict[int, int] = {}  # of the round's clients, in the order in which their answers are needed

    def build(self, recipe: Recipe, cache: ReadCache | None, executor: Executor) -> Job:
        require_simulable(recipe, executor)
        return super().build(recipe, cache, executor)

    def begin(self, session: Session) -> None:
        """Starts Flower's simulation, if rounds are left."""
        if not session.complete:
            self._inputs = inputs_of(session.job)
            self._clients = _Clients(session.job, session.folder / "flower.log")

    def train(self, session: Session, clients: Sequence[int], tracked: Sequence[int], plan: Plan) -> RoundReport:
        setup, plan = session.job.setup.at(session.state.round), replace(plan, trainer=self._train)
        steps = local_steps(setup.problem, clients, setup.info) if clients else {}
        self._steps = {client: steps[client] for part in deal(steps, plan.parts) for client in part}
        return run_round(session.job.setup, session.state, clients, tracked, plan)

    def close(self) -> None:
        """Ends Flower's processes."""
        if self._clients is not None:
            self._clients.close()

    def _train(
        self,
        setup: Setup,
        state: FederationState,
        clients: list[int],
        counts: list[int],
        tracked: set[int],
        progress: Progress,
    ) -> Trained:
        """What train_together does, by Flower's clients."""
        assert self._clients is not None, "begin starts them"

        def order(client: int) -> bytes:
            return order_bytes(setup, state, client, self._steps[client], client in tracked, self._inputs)

        coming = list(self._steps)[list(self._steps).index(clients[-1]) + 1 :]
        found = self._clients.ask(clients, coming, order, lambda client: progress(self._steps[client]))
        rows, _ = rows_of(setup, state.x, clients, counts, tracked)
        answers = [found[client] for client in clients]
        sent, kept, local = (_stack([answer[part] for answer in answers], state) for part in (1, 2, 3))
        own = state.clients.get(clients, state.x.device)
        before = {name: value for name, value in own.items() if name not in (BUFFERS, PERSONAL)}
        losses = None if answers[0][4] is None else torch.cat([answer[4] for answer in answers]).to(state.x.device)
        uploads = Uploads(sent, kept, before, clients, setup.info.index)
        began = time.perf_counter() - sum(answer[0] for answer in answers)
        return Trained(began, rows, local, uploads, losses)


def _stack(rows: Sequence[State], state: FederationState) -> State:
    """The rows {name: [1, n]} of some clients as one matrix a name."""
    return {name: torch.cat([row[name] for row in rows]).to(state.x.device) for name in rows[0]}


class _Clients:
    """The process with Flower's simulation, and the link to its clients. log: the file for what it says."""

    def __init__(self, job: Job, log: Path) -> None:
        self._log, self._seconds, count = log, job.recipe.run.timeout, job.info.num_clients
        self._threads = job.recipe.run.threads or 1
        self._cores = None if "RAY_ADDRESS" in os.environ else max(usable_cores(), self._threads)  # None: the cluster's
        self._ahead = count if self._cores is None else self._cores // self._threads
        self._asked: dict[str, int] = {}  # request -> client
        self._found: dict[int, tuple[Any, ...]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="fedllm-"))  # of mode 0700
        socket = self._folder / "run.sock"
        names = {str(client): client for client in range(count)}
        self._link = GridLink(socket, {}, names, insecure=True, check=self._check)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._start(job, socket)
            self._wait(count)
        except BaseException:
            self.close()
            raise

    def _start(self, job: Job, socket: Path) -> subprocess.Popen[bytes]:
        settings = {
            "socket": str(socket),
            "sections": json.dumps(_client_sections(job.recipe, self._threads)),
            "clients": job.info.num_clients,
            "threads": self._threads,
            "cores": self._cores,
        }
        path = self._folder / "settings.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        say(f"starting Flower's simulation engine for {job.info.num_clients} clients; its log is {self._log}", "dim")
        with self._log.open("ab") as log:
            return subprocess.Popen(
                bound([str(simulation_python()), "-m", _PROGRAM, str(path)]),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=_environment(self._folder),
                start_new_session=True,
            )

    def _wait(self, count: int) -> None:
        end = time.monotonic() + _START
        while len(self._link.online()) < count:
            if time.monotonic() > end:
                raise RunError(f"Flower's simulation did not start in {_START:.0f} s; its log is {self._log}")
            time.sleep(_POLL)

    def _check(self) -> None:
        """Raises RunError if Flower's process has ended."""
        if self._process is not None and self._process.poll() is not None:
            lines = log_tail(self._log).splitlines()
            last = lines[-1] if lines else "it wrote nothing"
            raise RunError(f"Flower's simulation has ended; its log is {self._log} and ends with: {last}")

    def ask(
        self,
        clients: Sequence[int],
        coming: Sequence[int],
        order: Callable[[int], bytes],
        done: Callable[[int], None],
    ) -> dict[int, tuple[Any, ...]]:
        """What these clients answer; see read_answer. done(client): called after each answer.

        coming: the clients that are needed next, of whom one for each of Ray's processes is asked already, so that no
        process waits for this one. order(client): its order.

        Raises RunError for a client that fails or has not answered after `run.timeout` seconds."""
        known = {*self._asked.values(), *self._found}
        unasked = [client for client in (*clients, *coming) if client not in known]
        while not self._found.keys() >= set(clients):
            while unasked and len(self._asked) + len(self._found) < len(clients) + self._ahead:
                client = unasked.pop(0)
                self._asked[self._link.send(client, "train", order(client), self._seconds)] = client
            replies = self._link.replies()
            for reply in replies:
                client = self._asked.pop(reply.request)
                if reply.body is None:
                    raise RunError(f"client {client}: Flower's simulation lost it ({reply.why}); see {self._log}")
                try:
                    self._found[client] = read_answer(reply.body)
                except UserError as error:
                    raise RunError(f"client {client}: {error}") from error
                done(client)
            if not replies:
                time.sleep(_POLL)
        return {client: self._found.pop(client) for client in clients}

    def close(self) -> None:
        """Lets Flower and Ray end; kills what is left of them."""
        process, self._process = self._process, None
        self._link.close()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _client_sections(recipe: Recipe, threads: int) -> dict[str, Any]:
    """The sections of the recipe as Ray's processes read it."""
    sections = {name: keys or None for name, keys in recipe.sections().items()}
    hub = recipe.run.local_hub or os.environ.get("FEDLLM_LOCAL_HUB")
    own = {"device": "cpu", "threads": threads, "stacked_clients": 1, "trackers": [], "local_hub": hub}
    return {**sections, "run": {**(sections["run"] or {}), **own, "engine": "fedllm"}}


def _environment(home: Path) -> dict[str, str]:
    """Of Flower's process: nothing is reported to others."""
    package = Path(__file__).resolve().parents[2]
    paths = [str(package)] if not (package / "certifi").exists() else []  # a source tree, not a site-packages
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("FLWR_")},
        "PYTHONPATH": os.pathsep.join(paths),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }

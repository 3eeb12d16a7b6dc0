"""Every process but rank 0: it does the tasks that the captain sends, one by one, until the captain is gone."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedllm.algorithms.base import State
from fedllm.assemble import Job, Shelf, assemble
from fedllm.clients import pack_kept, unpack_kept
from fedllm.console import console
from fedllm.errors import RunError, UserError
from fedllm.processes import Links, LostError, Message
from fedllm.recipe import make_recipe
from fedllm.rounds import blank, full_gradients, local_steps
from fedllm.training import train_share, under


def serve(links: Links) -> int:
    """Answers rank 0 until it closes the connection; the exit code. A failure is an answer like any other."""
    console.quiet = True
    # The launcher's signals are for rank 0, which can so tell who failed first; a worker ends when rank 0 is gone.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = _Worker(links)
    try:
        while links.ready([0], links.timeout):
            head, tensors = links.receive(0)
            links.timeout = head["timeout"]
            answer, found = worker.do(head, tensors)
            links.send(0, {**answer, "call": head["call"]}, found)
    except (LostError, OSError):
        return 0
    finally:
        links.close()
    return 1  # rank 0 has been silent for too long


class _Worker:
    def __init__(self, links: Links) -> None:
        self._links, self._shelf = links, Shelf()
        self._job: Job | None = None
        self._folder: Path | None = None

    def do(self, head: dict[str, Any], tensors: State) -> Message:
        try:
            if head["do"] == "assemble":
                recipe = make_recipe(head["sections"], "recipe", "recipe")
                self._job = None
                self._job = assemble(recipe, shelf=self._shelf, processes=self._links.size)
                return {"data": self._job.data}, {}
            if head["do"] == "share":
                return self._share(Path(head["folder"]), head["token"])
            assert self._job is not None
            tasks: dict[str, Callable[..., Message]] = {
                "train": self._train, "gradients": self._gradients, "logits": self._logits
            }  # fmt: skip
            return tasks[head["do"]](self._job, head, tensors)
        except (UserError, RunError) as error:
            return {"error": str(error), "kind": type(error).__name__}, {}
        except Exception:
            return {"error": traceback.format_exc(), "kind": "Exception"}, {}

    def _share(self, folder: Path, token: str) -> Message:
        """Whether this process sees rank 0's folder, or only one of that name on another machine, or none."""
        try:
            found = (folder / "probe").read_text() == token
        except OSError:
            found = False
        self._folder = folder if found else None
        return {"found": found}, {}

    def _train(self, job: Job, head: dict[str, Any], tensors: State) -> Message:
        device = job.machine.device
        info = replace(job.info, index=head["round"])
        federation = blank(job.algorithm, job.problem, info, folder=self._folder)
        federation.x = tensors["x"].to(device)
        federation.server = {name: value.to(device) for name, value in under("server/", tensors).items()}
        federation.clients.commit(unpack_kept(head["files"], tensors))
        answers: list[dict[str, Any]] = []
        found: State = {}
        cohort = head["cohort"]
        for place, share in enumerate(head["shares"]):
            steps = local_steps(job.problem, share, info)
            tracked = set(head["tracked"])
            trained = train_share(job.algorithm, job.problem, federation, info, steps, tracked, cohort, self._check)
            cohort = trained.forced or cohort
            answer, packed = trained.pack()
            answers.append(answer)
            found |= {f"{place}/{name}": value for name, value in packed.items()}
        return {"shares": answers}, found

    def _check(self, steps: int) -> None:
        """Rank 0 sends nothing while it waits for an answer: if there is something, it has given this task up."""
        if self._links.ready([0], 0.0):
            raise RunError("rank 0 has given this task up")

    def _gradients(self, job: Job, head: dict[str, Any], tensors: State) -> Message:
        federation = blank(job.algorithm, job.problem, job.info, folder=self._folder)
        federation.x = tensors["x"].to(job.machine.device)
        answers: list[dict[str, Any]] = []
        found: State = {}
        for place, share in enumerate(head["shares"]):
            total, kept = full_gradients(job.algorithm, job.problem, federation, job.info, share, head["cohort"])
            files, packed = pack_kept(kept)
            answers.append({"files": files})
            found |= {f"{place}/{name}": value for name, value in {"total": total, **packed}.items()}
        return {"shares": answers}, found

    def _logits(self, job: Job, head: dict[str, Any], tensors: State) -> Message:
        x = tensors["x"].to(job.machine.device)
        job.problem.eval_cuts = head["cuts"]
        logits = job.problem.logits(x, job.validation, head["part"], head["parts"])
        return {"cuts": job.problem.eval_cuts}, {"logits": logits}

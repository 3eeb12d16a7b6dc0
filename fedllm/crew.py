"""Who does a run's work: this process alone, or a captain (rank 0) with workers that do as it asks.

The captain alone reads recipes and checkpoints, knows what every client keeps, aggregates, and writes. With every task
a worker is sent what it needs of all that, x and its clients' own vectors included, these by the names of their files
where it reaches them, so that a client may be trained by another process in every round. What comes back is summed in
the order of the shares, whoever computed them: the number of processes leaves no trace in a result.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from fedllm.algorithms.base import Algorithm, RoundInfo, State
from fedllm.clients import Kept, pack_kept, unpack_kept
from fedllm.errors import RunError, UserError
from fedllm.processes import Links, LostError, Message, StoppedError, ending
from fedllm.profile import section
from fedllm.training import Share, under

if TYPE_CHECKING:
    from fedllm.assemble import Job
    from fedllm.lora_problem import LoraProblem
    from fedllm.recipe import Recipe
    from fedllm.rounds import Federation
    from fedllm.tokens import Tokens

T = TypeVar("T")
Gradients = tuple[Tensor, dict[int, Kept]]


class Crew:
    """One process: all of the work is its own."""

    size = 1

    def assemble(self, recipe: Recipe, build: Callable[[], Job]) -> Job:
        """What `build` gives, once every process has built the same from the recipe."""
        return build()

    def share(self, folder: Path) -> None:
        """The clients' vectors will be files in `folder`: finds out which processes reach it."""

    def own(self, shares: Sequence[T]) -> Sequence[T]:
        """The shares that this process does itself."""
        return shares

    def check(self) -> None:
        """Raises RunError or UserError if another process has failed or is gone."""

    def train(
        self,
        alg: Algorithm,
        federation: Federation,
        info: RoundInfo,
        shares: list[list[int]],
        tracked: Sequence[int],
        cohort: int | None,
        one: Callable[[list[int]], Share],
    ) -> list[Share]:
        """What the training of each share gave, in their order. one: trains a share here."""
        return [one(share) for share in shares]

    def gradients(
        self, x: Tensor, shares: list[list[int]], cohort: int | None, one: Callable[[list[int]], Gradients]
    ) -> list[Gradients]:
        """The full gradients of each share, in their order. one: computes a share here."""
        return [one(share) for share in shares]

    def logits(self, problem: LoraProblem, x: Tensor, tokens: Tokens) -> Tensor:
        """Logits [n, labels] of the validation split at x [d]; problem.eval_cuts is then that of all processes."""
        return problem.logits(x, tokens)


class Captain(Crew):
    """Rank 0 of several processes. It does its part like the others, and watches them meanwhile."""

    def __init__(self, links: Links) -> None:
        self._links, self.size = links, links.size
        self._call = 0
        self._doing: dict[int, str] = {}
        self._replies: dict[int, Message] = {}
        self._sharing: set[int] = set()

    def share(self, folder: Path) -> None:
        token, probe = secrets.token_hex(16), folder / "probe"
        probe.write_text(token)
        head = {"do": "share", "folder": str(folder.resolve()), "token": token}
        tasks: dict[int, Message] = {rank: (head, {}) for rank in self._ranks}
        _, replies = self._together(lambda: None, tasks, lambda rank: "looking for the run folder")
        self._sharing = {rank for rank, (answer, _) in replies.items() if answer["found"]}
        probe.unlink()

    def own(self, shares: Sequence[T]) -> Sequence[T]:
        return shares[:: self.size]

    def check(self) -> None:
        self._collect(0.0)

    def assemble(self, recipe: Recipe, build: Callable[[], Job]) -> Job:
        self._links.timeout = recipe.run.timeout
        head = {"do": "assemble", "sections": recipe.sections()}
        tasks: dict[int, Message] = {rank: (head, {}) for rank in self._ranks}
        built, replies = self._together(build, tasks, lambda rank: "preparing the run")
        data = built.data
        for rank, (answer, _) in replies.items():
            if other := [name for name in data if answer["data"][name] != data[name]]:
                raise UserError(
                    f"process {rank} read other data than process 0 (it differs in: {', '.join(other)}); every machine "
                    f"must find the same files under the names in the recipe"
                )
        return built

    def train(
        self,
        alg: Algorithm,
        federation: Federation,
        info: RoundInfo,
        shares: list[list[int]],
        tracked: Sequence[int],
        cohort: int | None,
        one: Callable[[list[int]], Share],
    ) -> list[Share]:
        known = federation.clients.known()
        model = {"x": federation.x, **{f"server/{name}": value for name, value in federation.server.items()}}
        tasks = {}
        for rank, part in self._parts(shares).items():
            kept = {client: known[client] for share in part for client in share if client in known}
            files, tensors = pack_kept(kept, by_name=rank in self._sharing)
            head = {"do": "train", "round": federation.round, "shares": part, "tracked": tracked, "cohort": cohort}
            tasks[rank] = ({**head, "files": files}, model | tensors)

        def doing(rank: int) -> str:
            clients = sorted(client for share in shares[rank :: self.size] for client in share)
            return f"training in round {info.index + 1}: clients {', '.join(map(str, clients))}"

        mine, replies = self._together(lambda: [one(share) for share in self.own(shares)], tasks, doing)

        def read(head: dict[str, Any], tensors: State) -> Share:
            return Share.empty(alg, federation.x, info).unpack(head, tensors)

        return self._in_order(len(shares), mine, replies, read)

    def gradients(
        self, x: Tensor, shares: list[list[int]], cohort: int | None, one: Callable[[list[int]], Gradients]
    ) -> list[Gradients]:
        tasks: dict[int, Message] = {
            rank: ({"do": "gradients", "shares": part, "cohort": cohort}, {"x": x})
            for rank, part in self._parts(shares).items()
        }

        def doing(rank: int) -> str:
            clients = sorted(client for share in shares[rank :: self.size] for client in share)
            return f"computing full gradients: clients {', '.join(map(str, clients))}"

        mine, replies = self._together(lambda: [one(share) for share in self.own(shares)], tasks, doing)
        return self._in_order(
            len(shares), mine, replies, lambda head, found: (found["total"], unpack_kept(head["files"], found))
        )

    def logits(self, problem: LoraProblem, x: Tensor, tokens: Tokens) -> Tensor:
        head = {"do": "logits", "parts": self.size, "cuts": problem.eval_cuts}
        tasks: dict[int, Message] = {rank: ({**head, "part": rank}, {"x": x}) for rank in self._ranks}
        total, replies = self._together(
            lambda: problem.logits(x, tokens, 0, self.size), tasks, lambda rank: "evaluating"
        )
        for rank in self._ranks:
            answer, found = replies[rank]
            total += found["logits"]
            problem.eval_cuts = max(problem.eval_cuts, answer["cuts"])
        return total

    @property
    def _ranks(self) -> range:
        return range(1, self.size)

    def _parts(self, shares: list[list[int]]) -> dict[int, list[list[int]]]:
        return {rank: part for rank in self._ranks if (part := shares[rank :: self.size])}

    def _in_order(
        self, count: int, mine: list[T], replies: dict[int, Message], read: Callable[[dict[str, Any], State], T]
    ) -> list[T]:
        """The results of all shares; a worker's reply holds those of its shares one after the other."""
        found: dict[int, T] = dict(zip(range(0, count, self.size), mine, strict=True))
        for rank, (head, tensors) in replies.items():
            for place, share in enumerate(range(rank, count, self.size)):
                found[share] = read(head["shares"][place], under(f"{place}/", tensors))
        return [found[share] for share in range(count)]

    def _together(
        self, own: Callable[[], T], tasks: dict[int, Message], doing: Callable[[int], str]
    ) -> tuple[T, dict[int, Message]]:
        """What `own` gives here and the tasks' replies by rank, once all are there."""
        self._call += 1
        self._replies = {}
        self._doing = {rank: doing(rank) for rank in tasks}
        try:
            with section("wait"):
                self._send(tasks)
            result = own()
            with section("wait"):
                self._wait()
        except StoppedError:
            self._collect(1.0)  # the launcher stops every process when one is lost: say which
            raise
        finally:
            self._doing = {}
        return result, self._replies

    def _send(self, tasks: dict[int, Message]) -> None:
        for rank, (head, tensors) in tasks.items():
            try:
                self._links.send(rank, {**head, "call": self._call, "timeout": self._links.timeout}, tensors)
            except OSError as error:
                raise self._lost(rank) from error

    def _wait(self) -> None:
        """Until every process has answered."""
        while self._doing:
            if not self._collect(self._links.timeout):
                waiting = "; ".join(f"process {rank} was {what}" for rank, what in self._doing.items())
                raise RunError(
                    f"no answer for {self._links.timeout:g} s (run.timeout): {waiting}. The last checkpoint is "
                    f"intact: the same command goes on from it"
                )

    def _collect(self, timeout: float) -> bool:
        """Takes the replies that are there within `timeout` seconds; whether there were any."""
        ready = self._links.ready(list(self._doing), timeout)
        for rank in ready:
            try:
                head, tensors = self._links.receive(rank)
            except LostError as error:
                raise self._lost(rank) from error
            if head["call"] != self._call:
                continue  # the answer to a call that was given up
            if "error" in head:
                self._raise(rank, head)
            self._replies[rank] = (head, tensors)
            del self._doing[rank]
        return bool(ready)

    def _lost(self, rank: int) -> StoppedError:
        ending()
        return StoppedError(
            f"process {rank} ended without a word (killed, or out of memory?) while {self._doing[rank]}. The last "
            f"checkpoint is intact: the same command goes on from it"
        )

    def _raise(self, rank: int, head: dict[str, Any]) -> None:
        if head["kind"] == "UserError":
            raise UserError(f"process {rank}: {head['error']}")
        raise RunError(
            f"process {rank} failed while {self._doing[rank]}. The last checkpoint is intact.\n{head['error'].rstrip()}"
        )

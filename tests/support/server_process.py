"""A server of a deployed run as a process, which kills itself and is started again. Run as a script, it is that."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

MOMENTS = ("order sent", "upload added", "aggregated", "checkpoint saved")


def main(recipe: Path, plan: Path, sockets: dict[int, Path]) -> None:
    """Serves the recipe. plan: a file that maps a round (from 0) to one of MOMENTS, at which the process ends once."""
    from fedllm.config.recipe import load_recipe
    from fedllm.deployment import rounds
    from fedllm.deployment.local import LocalLink
    from fedllm.deployment.server import Server
    from fedllm.experiment.checkpoints import Checkpoints
    from fedllm.experiment.serve import serve

    def at(moment: str, round: int) -> None:
        planned = yaml.safe_load(plan.read_text())
        if planned.get(round) == moment:
            del planned[round]
            plan.write_text(yaml.safe_dump(planned))
            os.kill(os.getpid(), signal.SIGKILL)

    class Link(LocalLink):
        def send(self, site: int, kind: Any, body: bytes, seconds: float) -> str:
            name = super().send(site, kind, body, seconds)
            if kind == "train":
                at("order sent", rounds.TrainOrder.from_bytes(body).broadcast.round)
            return name

    add, aggregate, save = Server.add, Server.aggregate, Checkpoints.save

    def add_told(self: Server, *arguments: Any, **keys: Any) -> Any:
        found = add(self, *arguments, **keys)
        at("upload added", self.round)
        return found

    def aggregate_told(self: Server, *arguments: Any) -> Any:
        found = aggregate(self, *arguments)
        at("aggregated", self.round - 1)
        return found

    def save_told(self: Checkpoints, state: Any, *others: Any) -> Path:
        found = save(self, state, *others)
        at("checkpoint saved", state.round - 1)
        return found

    Server.add, Server.aggregate, Checkpoints.save = add_told, aggregate_told, save_told  # type: ignore[method-assign]
    serve(load_recipe(recipe), Link(sockets))


def watch(recipe: Path, plan: Path, sockets: dict[int, Path]) -> int:
    """Forks the server until it ends well; returns how often it was started."""
    import fedllm.experiment.serve  # noqa: F401

    for starts in range(1, 20):
        if (child := os.fork()) == 0:
            try:
                main(recipe, plan, sockets)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return starts if status == 0 else -1
    return -1


if __name__ == "__main__":
    count = int(sys.argv[4])
    found = watch(
        Path(sys.argv[1]), Path(sys.argv[2]), {n: Path(sys.argv[3]) / f"s{n}" / "socket" for n in range(count)}
    )
    print(found)
    sys.exit(found < 0)

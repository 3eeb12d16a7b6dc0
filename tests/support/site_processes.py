"""Sites as processes of their own, which may be killed, over the local link. Run as a script, this file is one site."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import forked
import yaml

MOMENTS = (
    "before training", "in training", "after training", "state saved", "answer saved", "answer sent",
)  # fmt: skip
FULL_DISK = "full disk"  # in the place of a moment: in that round the site can write no file above _ROOM bytes
_ROOM = 1000


class SiteProcesses:
    """Keeps a process for each site until `close`: one that ended is started again after a moment.

    They are forks of a fork (see forked.py) that looks after them.
    kills: round (from 0) -> (site, one of MOMENTS): that site kills itself there with SIGKILL, once."""

    def __init__(self, folder: Path, trains: Sequence[Path], kills: dict[int, tuple[int, str]] | None = None) -> None:
        self.folder, self.count = folder, len(trains)
        for site, path in enumerate(trains):
            self._write(site, path, kills or {})
        self._parent = forked.start(__file__, str(folder), str(self.count), out=folder / "said.txt")

    @property
    def sockets(self) -> dict[int, Path]:
        return {site: self.folder / f"s{site}" / "socket" for site in range(self.count)}

    @property
    def starts(self) -> int:
        """Processes that were started so far."""
        return len((self.folder / "starts").read_text())

    def wait_for(self, starts: int, seconds: float = 60) -> None:
        """Waits until so many processes were started, or that long. A kill may come after the end of a run."""
        end = time.monotonic() + seconds
        while self.starts < starts and time.monotonic() < end:
            time.sleep(0.1)

    def _write(self, site: int, train: Path, kills: dict[int, tuple[int, str]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {round: moment for round, (killed, moment) in kills.items() if killed == site}
        (self.folder / f"kills{site}.yaml").write_text(yaml.safe_dump(own))
        keys = {
            "name": f"site{site}", "server": "127.0.0.1:18000", "insecure": True, "train": str(train),
            "state": str(self.folder / f"state{site}"), "threads": 1, "device": "cpu", "allow": {"min_sites": None},
        }  # fmt: skip
        (self.folder / f"site{site}.yaml").write_text(yaml.safe_dump(keys))

    def close(self) -> None:
        (self.folder / "end").touch()
        self._parent.wait()


@contextlib.contextmanager
def room(full: bool) -> Iterator[None]:
    """Bounds the size of each file that this process writes, where the disk is to be full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM if full else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def watch(folder: Path, count: int) -> None:
    """Forks a process for each site, and another where one ended, until the file `end` is there."""
    import fedllm.experiment.site  # noqa: F401

    running: dict[int, int] = {}
    while not (folder / "end").exists():
        time.sleep(0.2)
        for site in range(count):
            if site in running and os.waitpid(running[site], os.WNOHANG) == (0, 0):
                continue
            with (folder / "starts").open("a") as file:
                file.write(".")
            if (child := os.fork()) == 0:
                main(str(folder / f"site{site}.yaml"), str(folder / f"s{site}" / "socket"), str(site))
            running[site] = child
    for child in running.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main(file: str, socket: str, number: str) -> None:
    """One site. Its clock is `number` days ahead."""
    from fedllm.deployment import site_messages
    from fedllm.deployment.site_settings import load_site
    from fedllm.experiment import site, site_run

    real = time.time
    time.time = lambda: real() + 86_400 * int(number)
    kills = Path(file).with_name(f"kills{number}.yaml")
    current = {"round": -1}

    def at(moment: str, round: int | None = None) -> None:
        round, planned = current["round"] if round is None else round, yaml.safe_load(kills.read_text())
        if planned.get(round) == moment:
            del planned[round]
            kills.write_text(yaml.safe_dump(planned))
            os.kill(os.getpid(), signal.SIGKILL)

    train, steps, write = site_run.SiteRun.train, site_run.train_together, site_run.replace_bytes

    def train_told(self: site_run.SiteRun, data: bytes, order: site_messages.TrainOrder) -> bytes:
        current["round"] = order.broadcast.round
        at("before training")
        with room(yaml.safe_load(kills.read_text()).get(order.broadcast.round) == FULL_DISK):
            answer = train(self, data, order)
        at("answer saved")
        threading.Timer(0.3, at, ["answer sent", order.broadcast.round]).start()
        return answer

    def steps_told(*arguments: object) -> object:
        found = steps(*arguments[:-1], lambda active: at("in training"))  # type: ignore[arg-type]
        at("after training")
        return found

    def write_told(path: Path, data: bytes) -> None:
        at("state saved")
        write(path, data)

    site_run.SiteRun.train, site_run.train_together, site_run.replace_bytes = train_told, steps_told, write_told  # type: ignore[method-assign,assignment]
    site.stay(load_site(file), Path(socket))


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]))

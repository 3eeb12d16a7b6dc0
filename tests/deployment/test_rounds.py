"""The server's rounds over a link: whom it asks, again and when, and when it goes on without a site."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from mutations import mutated
from small_clients import DIM, batches, client_of, squared

from fedllm.config.settings import DeploymentSettings
from fedllm.deployment import rounds as deployed
from fedllm.deployment.asking import Sites
from fedllm.deployment.link import Kind, Reply
from fedllm.deployment.rounds import site_scores, weighted
from fedllm.deployment.server import Server
from fedllm.deployment.site_messages import Announcement, Failure, Joined, Scores, TrainAnswer

RUN = "0" * 32
Answer = Callable[[int, Kind, int], bytes | None]


class ScriptedLink:
    """A link whose sites answer at once with answer(site, kind, number of the request), None for no answer."""

    def __init__(self, lives: dict[int, str], answer: Answer) -> None:
        self.lives, self.answer, self.sent = lives, answer, list[tuple[int, Kind]]()
        self._replies: list[Reply] = []

    def online(self) -> dict[int, str]:
        return dict(self.lives)

    def send(self, site: int, kind: Kind, body: bytes, seconds: float) -> str:
        assert seconds > 0
        self.sent.append((site, kind))
        name = str(len(self.sent))
        body_of = JOINED if kind == "announce" else self.answer(site, kind, self.sent.count((site, kind)))
        if body_of is not None:
            self._replies.append(Reply(name, site, body_of))
        return name

    def replies(self) -> list[Reply]:
        found, self._replies = self._replies, []
        return found

    def close(self) -> None:
        pass


JOINED = Joined("a", 10, 5, "cpu", {}).to_bytes()


def sites(link: ScriptedLink, **keys: float) -> Sites:
    limits = DeploymentSettings(**{"deadline": 0.3, "ask_again": 60, "patience": 0.3, **keys})  # type: ignore[arg-type]
    return Sites(link, lambda site: Announcement(RUN, site, 3, {}, (), "1"), limits, lambda text: None)


def ask(asked: Sites, least: int, take: Callable[[int, bytes], str | None] = lambda site, body: None) -> object:
    return asked.ask("train", [0, 1, 2], lambda site: b"order", take, least)


def test_a_round_ends_with_the_last_answer() -> None:
    link = ScriptedLink({0: "a", 1: "a", 2: "a"}, lambda site, kind, count: b"answer")
    began = time.monotonic()
    heard = ask(sites(link, deadline=60), 3)
    assert heard.accepted == [0, 1, 2]  # type: ignore[attr-defined]
    assert sorted(link.sent) == [(site, kind) for site in range(3) for kind in ("announce", "train")]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("least", "seconds"), [(2, 0.3), (3, 0.6)])
def test_a_missing_site_is_waited_for_until_the_deadline_or_longer(least: int, seconds: float) -> None:
    link = ScriptedLink({0: "a", 1: "a", 2: "a"}, lambda site, kind, count: None if site == 1 else b"answer")
    began = time.monotonic()
    heard = ask(sites(link), least)
    assert list(heard.missing) == [1]  # type: ignore[attr-defined]
    assert seconds <= time.monotonic() - began < seconds + 3


def test_a_site_is_asked_again_in_its_next_life_and_after_ask_again() -> None:
    def answer(site: int, kind: Kind, count: int) -> bytes | None:
        if (site, count) == (1, 1):
            link.lives[1] = "b"
        return None if count == 1 and site else b"answer"

    link = ScriptedLink({0: "a", 1: "a", 2: "a"}, answer)
    heard = ask(sites(link, deadline=60, ask_again=0.5), 3)
    assert sorted(heard.accepted) == [0, 1, 2]  # type: ignore[attr-defined]
    assert link.sent.count((1, "announce")) == 2
    assert [link.sent.count((site, "train")) for site in range(3)] == [1, 2, 2]


@pytest.mark.slow
def test_a_process_that_does_not_know_the_run_is_told_again() -> None:
    again = Failure("has not been told of this run", "site", again=True).to_bytes()
    link = ScriptedLink({0: "a", 1: "a", 2: "a"}, lambda site, kind, count: again if count == 1 else b"answer")
    heard = ask(sites(link, deadline=60), 3)
    assert sorted(heard.accepted) == [0, 1, 2]  # type: ignore[attr-defined]
    assert link.sent.count((0, "announce")) == 2


def test_a_failure_is_a_reason_and_not_asked_again() -> None:
    failed = Failure("its disk is full\x1b[31m", "site").to_bytes()
    link = ScriptedLink({0: "a", 1: "a", 2: "a"}, lambda site, kind, count: failed if site == 1 else b"answer")
    heard = ask(sites(link, deadline=60), 2)
    assert heard.refused == {1: "its disk is full [31m"}  # type: ignore[attr-defined]
    assert link.sent.count((1, "train")) == 1


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_mutated_answer_of_a_site_counts(seed: int) -> None:
    draw, site = random.Random(seed), client_of("fadamgc")
    server = Server(site.algorithm, torch.zeros(DIM), site.info)
    upload = site.fit(server.broadcast(1), batches(), squared)
    good, received = TrainAnswer(upload, 0.5, 0.1).to_bytes(), deployed._Received(None)
    for _ in range(1000):
        message = mutated(good, draw)
        try:
            found = TrainAnswer.from_bytes(message)
            if found.upload.head == upload.head and found.upload.receipt == upload.receipt:
                continue  # the change left what the upload says
        except ValueError:
            pass
        assert deployed._add(server, received, 1, message, True), message[:500]
    assert server.accepted == []
    assert deployed._add(server, received, 1, good, True) is None
    assert received.losses == {1: 0.5}


def test_scores_are_weighted_by_samples_and_foreign_ones_left_out() -> None:
    site = client_of("fadamgc")
    server = Server(site.algorithm, torch.zeros(DIM), site.info)
    told = {
        0: Scores(0, 10, {"accuracy": 0.5, "eval_loss": 1.0}),
        1: Scores(0, 30, {"accuracy": 0.9, "eval_loss": None}),
        2: Scores(0, 10, {"accuracy": 0.1}),
    }
    link = ScriptedLink({0: "a", 1: "a", 2: "a"}, lambda site, kind, count: told[site].to_bytes())
    asked = sites(link, deadline=60)
    asked.gather(range(3), 3)
    found = site_scores(asked, server, RUN, ["accuracy", "eval_loss"])
    assert list(found) == [0, 1]
    assert weighted(found) == {"accuracy": pytest.approx(0.8), "eval_loss": 1.0}

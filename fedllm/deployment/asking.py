"""The server's side of a link: which sites have joined, and orders that go to several of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from fedllm.common.errors import RunError, UserError
from fedllm.config.settings import DeploymentSettings
from fedllm.deployment.link import Kind, Reply, SiteLink
from fedllm.deployment.site_messages import HEAD_BYTES, Announcement, Joined, failure

POLL = 0.05  # seconds between two looks at the link
RETRY = 2.0  # seconds after which an order that the transport lost is sent again
Take = Callable[[int, bytes], str | None]  # of a site's answer: None, or why it is refused


@dataclass
class Heard:
    """What became of an order. accepted: sites whose answer was taken. refused: site -> reason. missing: site -> what
    is known of it."""

    accepted: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)


@dataclass
class _Sent:
    """The newest request of one kind to one site. at, lost: time.monotonic() of sending and losing it."""

    life: str
    at: float
    lost: float | None = None

    def is_due(self, life: str, ask_again: float) -> bool:
        """Whether the site is to be asked again."""
        now = time.monotonic()
        if self.lost is not None:
            return now - self.lost >= RETRY
        return self.life != life or now - self.at >= ask_again


class Sites:
    """The sites of one run. joined: site -> what it said when it joined.

    A site joins by accepting the announcement, once in each of its lives: a process that was started again is announced
    to again before it is asked anything. announce(site): the announcement for it. notify: called with lines for the
    user. No reply raises an error.
    """

    def __init__(
        self,
        link: SiteLink,
        announce: Callable[[int], Announcement],
        settings: DeploymentSettings,
        notify: Callable[[str], None],
    ) -> None:
        self.joined: dict[int, Joined] = {}
        self._link, self._announce, self._settings, self._notify = link, announce, settings, notify
        self._lives: dict[int, str] = {}  # site -> the life in which it joined
        self._refusals: dict[int, tuple[str, str]] = {}  # site -> the life in which it refused to join, and why
        self._announced: dict[int, _Sent] = {}
        self._announcements: dict[str, tuple[int, str]] = {}  # request -> site, life

    def gather(self, sites: Collection[int], least: int) -> None:
        """Waits until `least` of these sites have joined. Raises RunError after `patience` seconds without."""
        end = time.monotonic() + self._settings.patience
        while len(self._lives.keys() & set(sites)) < least:
            if time.monotonic() > end:
                raise RunError(self._too_few(sites, least))
            self._invite(sites, self._settings.patience)
            for reply in self._link.replies():
                self._hear_joining(reply)
            time.sleep(POLL)

    def present(self) -> list[int]:
        """The sites that have joined and can be reached now."""
        return sorted(self.joined.keys() & self._link.online().keys())

    def _too_few(self, sites: Collection[int], least: int) -> str:
        states = "\n".join(f"  site {site}: {self._known_of(site)}" for site in sorted(sites))
        return (
            f"waited {self._settings.patience:.0f} s (deployment.patience) for {least} sites to join, found "
            f"{len(self._lives)}:\n{states}"
        )

    def _known_of(self, site: int) -> str:
        if site in self._lives:
            return "has joined"
        if site in self._refusals:
            return self._refusals[site][1]
        return "has not answered" if site in self._announced else "was not reached"

    def ask(self, kind: Kind, sites: Collection[int], order: Callable[[int], bytes], take: Take, least: int) -> Heard:
        """Sends an order to each of these sites and takes their answers as they come.

        order(site): its bytes; asked for again where the order is sent again. Returns when all have answered, or after
        `deadline` seconds with at least `least` accepted answers, or `patience` seconds later without. A site that was
        refused is asked again in its next life.
        """
        heard, began = Heard(), time.monotonic()
        waiting, sent, requests = set(sites), dict[int, _Sent](), dict[str, tuple[int, str]]()
        limits, refused_in = self._settings, dict[int, str]()
        while True:
            passed = time.monotonic() - began
            left = limits.deadline + limits.patience - passed
            lives = self._invite(waiting | heard.refused.keys(), left)
            for site in [site for site, life in refused_in.items() if lives.get(site, life) != life]:
                del heard.refused[site], refused_in[site]
                waiting.add(site)
            for site in sorted(waiting & lives.keys()):
                life = lives[site]
                if (refusal := self._refusals.get(site)) and refusal[0] == life:
                    heard.refused[site], refused_in[site] = refusal[1], life
                elif self._lives.get(site) == life and (site not in sent or sent[site].is_due(life, limits.ask_again)):
                    requests[self._link.send(site, kind, order(site), left)] = (site, life)
                    sent[site] = _Sent(life, time.monotonic())
            waiting -= heard.refused.keys()
            for reply in self._link.replies():
                if self._hear_joining(reply) or (known := requests.pop(reply.request, None)) is None:
                    continue
                site, life = known
                if reply.site != site or site not in waiting:
                    continue
                if reply.body is None:
                    sent[site].lost = time.monotonic()
                    continue
                if (fault := failure(reply.body)) is not None and fault.again:
                    self._forget(site)
                    sent[site].lost = time.monotonic()
                    continue
                why = take(site, reply.body) if fault is None else fault.error
                waiting.discard(site)
                if why is None:
                    heard.accepted.append(site)
                else:
                    heard.refused[site], refused_in[site] = why, life
                    self._notify(f"site {site}: {why}")
            enough = len(heard.accepted) >= least
            if not waiting or (enough and passed >= limits.deadline) or left <= 0:
                heard.missing = {site: self._known_of(site) for site in sorted(waiting)}
                return heard
            time.sleep(POLL)

    def _invite(self, sites: Collection[int], seconds: float) -> Mapping[int, str]:
        """Announces the run to those that can be reached and have not been asked to join. Returns site -> life."""
        lives = self._link.online()
        for site in sorted(lives.keys() & set(sites)):
            life = lives[site]
            if self._lives.get(site) == life or self._refusals.get(site, ("", ""))[0] == life:
                continue
            before = self._announced.get(site)
            if before is None or before.is_due(life, self._settings.ask_again):
                request = self._link.send(site, "announce", self._announce(site).to_bytes(), seconds)
                self._announcements[request] = (site, life)
                self._announced[site] = _Sent(life, time.monotonic())
        return lives

    def _hear_joining(self, reply: Reply) -> bool:
        """Whether the reply is to an announcement; notes what it says."""
        if (known := self._announcements.pop(reply.request, None)) is None:
            return False
        site, life = known
        if reply.site != site:
            return True
        if reply.body is None:
            self._announced[site].lost = time.monotonic()
            return True
        try:
            if fault := failure(reply.body):
                raise UserError(fault.error)
            if len(reply.body) > HEAD_BYTES:
                raise UserError(f"found {len(reply.body):,} bytes, expected at most {HEAD_BYTES:,}")
            self.joined[site] = Joined.from_bytes(reply.body)
        except UserError as error:
            self._refusals[site] = (life, str(error))
            self._notify(f"site {site} does not join: {error}")
            return True
        if site not in self._lives:
            found = self.joined[site]
            self._notify(f"site {site} ({found.name}) has joined: {found.samples:,} samples, on {found.device}")
        self._lives[site] = life
        return True

    def _forget(self, site: int) -> None:
        """The site's process does not know the run: it is announced again."""
        self._lives.pop(site, None)
        self._announced.pop(site, None)

"""How a server reaches its sites: the interface that each transport implements. It carries bytes and knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["announce", "train", "evaluate", "status"]


@dataclass(frozen=True)
class Reply:
    """A site's answer to a request.

    request: the request's name. site: its number, as the transport authenticated it. body: None if the transport
    failed; why: then the reason.
    """

    request: str
    site: int
    body: bytes | None
    why: str = ""


class SiteLink(Protocol):
    """A transport between one server and the sites 0 to N - 1."""

    def online(self) -> dict[int, str]:
        """The sites that can be reached now: number -> life. A site that was started again has another life."""

    def send(self, site: int, kind: Kind, body: bytes, seconds: float) -> str:
        """Sends a request to a site and returns the request's name. The site may answer within `seconds`."""

    def replies(self) -> list[Reply]:
        """The replies since the last call. Returns at once."""

    def close(self) -> None:
        """Ends the connection. Requests without an answer are given up."""

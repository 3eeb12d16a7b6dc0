"""One round of a deployed run: the sampled sites are asked for uploads, which the server adds as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedllm.aggregation.drift import Drift, measures
from fedllm.aggregation.product_gap import Product, product_gap
from fedllm.aggregation.reduction import require_enough
from fedllm.common.errors import UserError
from fedllm.deployment.asking import Sites
from fedllm.deployment.messages import Upload
from fedllm.deployment.server import Server
from fedllm.deployment.site_messages import HEAD_BYTES, EvaluateOrder, Scores, TrainAnswer, TrainOrder
from fedllm.federation.rounds import RoundReport


@dataclass
class _Received:
    """What the sites of a round sent. losses: of the accepted ones. updates: their d
    [1, d] and their samples, where they are kept. bytes_up: of all tensors,
    most_up: of the largest upload. seconds: of the slowest site's local steps."""

    drift: Drift | None
    losses: dict[int, float] = field(default_factory=dict)
    updates: dict[int, tuple[Tensor, int]] | None = None
    bytes_up: int = 0
    most_up: int = 0
    seconds: float = 0.0


def deployed_round(
    sites: Sites,
    server: Server,
    run: str,
    clients: Sequence[int],
    tracked: Sequence[int],
    min_clients: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    products: Sequence[Product] = (),
) -> RoundReport:
    """Asks the sampled sites to train, and aggregates. run: see Announcement. progress(done, total): local steps.
    products: see Plan.

    Raises RunError, with each site's reason, if fewer than min_clients uploads were accepted within the round's time.
    The server is then as before the round. With client-level privacy one answer is enough, also one that is refused. A
    round without clients asks nobody.
    """
    if not clients:
        server.skip()
        return RoundReport([], [], None, {}, 0, 0, 0, 0, 0.0, {}, missing=[])
    steps, index, down = server.info.local_steps, server.round, _nbytes(server)
    received = _Received(Drift(server.algorithm, server.x, moments=False) if _sends_updates(server) else None)
    received.updates = {} if products else None

    def order(site: int) -> bytes:
        return TrainOrder(run, server.broadcast(site), site in tracked).to_bytes()

    def take(site: int, body: bytes) -> str | None:
        why = _add(server, received, site, body, site in tracked)
        if why is None:
            progress(steps * len(server.accepted), steps * len(clients))
        return why

    heard = sites.ask("train", clients, order, take, max(min_clients, server.fewest))
    if not (server.private and heard.refused):
        require_enough(len(heard.accepted), min_clients, heard.missing | heard.refused, index)
    left_out = server.left_out()
    drift, noise_ratio = _drift(server, received), server.noise_ratio
    if products:
        drift["lora_gap"] = _gap(server, received, left_out, products)
    server.aggregate(min_clients)
    losses = [loss for site, loss in received.losses.items() if site not in left_out]
    return RoundReport(
        clients=list(clients),
        tracked=list(tracked),
        train_loss=sum(losses) / len(losses) if losses else None,
        rejected=heard.refused | left_out,
        most_steps=steps,
        bytes_up=received.bytes_up,
        bytes_down=down * (len(heard.accepted) + len(heard.refused)),
        client_bytes=down + received.most_up,
        compute_seconds=received.seconds,
        drift=drift,
        missing=list(heard.missing),
        noise_ratio=noise_ratio,
    )


def _nbytes(server: Server) -> int:
    """Bytes of the tensors that a site receives."""
    broadcast = server.broadcast()
    return broadcast.x.nbytes + sum(value.nbytes for value in broadcast.server.values())


def _sends_updates(server: Server) -> bool:
    """Whether the uploads have d_i = x_i - x, from which the drift is measured."""
    return "d" in server.algorithm.uploads()


def _add(server: Server, received: _Received, site: int, body: bytes, tracked: bool) -> str | None:
    """Adds a site's answer to the round, or returns why it is rejected."""
    if len(body) > (most := server.most_bytes):
        return f"found {len(body):,} bytes, expected at most {most:,}"
    try:
        answer = TrainAnswer.from_bytes(body)
    except UserError as error:
        return str(error)
    upload = answer.upload
    size = sum(value.nbytes for value in upload.tensors.values())
    received.bytes_up, received.most_up = received.bytes_up + size, max(received.most_up, size)
    if upload.tracked is not tracked:
        return f"tracked: found {upload.tracked}, expected {tracked}, as the order said"
    if why := server.add(upload, client=site):
        return why
    received.seconds = max(received.seconds, answer.seconds)
    if answer.loss is not None:
        received.losses[site] = answer.loss
    _measure(server, received, upload)
    if received.updates is not None:
        received.updates[site] = server.update_of(upload), upload.samples
    return None


def _measure(server: Server, received: _Received, upload: Upload) -> None:
    if received.drift is not None:
        received.drift.add(server.x, {"x": server.x + server.update_of(upload)}, [0])


def _drift(server: Server, received: _Received) -> dict[str, float | None]:
    """The drift of the accepted uploads; {} where they have no d_i."""
    if received.drift is None:
        return {}
    mean = server.mean_update()
    return measures(received.drift.counts, mean, received.drift.along(mean), None)


def _gap(server: Server, received: _Received, left_out: Mapping[int, str], products: Sequence[Product]) -> float | None:
    """The gap of these products over the sites that count, see product_gap."""
    found = {site: each for site, each in sorted((received.updates or {}).items()) if site not in left_out}
    sizes = [samples if server.algorithm.weights == "size" else 1 for _, samples in found.values()]
    updates = torch.cat([update for update, _ in found.values()]) if found else server.x.new_zeros(0, len(server.x))
    return product_gap(server.x, updates, torch.tensor(sizes), products)


def site_scores(
    sites: Sites, server: Server, run: str, names: Sequence[str], everyone: bool = False
) -> dict[int, Scores]:
    """The scores of x at each site that has joined and has validation samples, on these alone.

    names: of the scores. everyone: sends x to the other sites too, which write their own models after the last round. A
    site that has not answered by the deadline, or gives other scores, is left out.
    """
    able = {site for site in sites.present() if sites.joined[site].validation}
    asked = sites.present() if everyone else sorted(able)
    message = EvaluateOrder(run, server.round, server.x, server.buffers).to_bytes()
    found: dict[int, Scores] = {}

    def take(site: int, body: bytes) -> str | None:
        if len(body) > HEAD_BYTES:
            return f"scores: found {len(body):,} bytes, expected at most {HEAD_BYTES:,}"
        try:
            scores = Scores.from_bytes(body)
        except UserError as error:
            return f"scores: {error}"
        if site not in able and not scores.samples:
            return None
        if not scores.samples:
            return "scores: found none, though the site has validation samples"
        if scores.round != server.round or scores.scores.keys() != set(names):
            return f"scores: found {sorted(scores.scores)} of round {scores.round}, expected {sorted(names)}"
        found[site] = scores
        return None

    sites.ask("evaluate", asked, lambda site: message, take, 0)
    return dict(sorted(found.items()))


def weighted(found: dict[int, Scores]) -> dict[str, float | None]:
    """The mean of the sites' scores, weighted by their validation samples; of those sites whose score is finite."""
    names = dict.fromkeys(name for each in found.values() for name in each.scores)
    means: dict[str, float | None] = {}
    for name in names:
        pairs = [(each.samples, each.scores[name]) for each in found.values()]
        finite = [(samples, score) for samples, score in pairs if score is not None]
        total = sum(samples for samples, _ in finite)
        means[name] = sum(samples * score for samples, score in finite) / total if total else None
    return means

"""One client of a real federation: runs the algorithms inside any training loop (HF Trainer, a Flower site).

client = Client(model, algorithm, info)                 # once per site; info must equal the server's, see model_info
upload = client.fit(broadcast, batches)                 # each round: the built-in loop, or
optimizer = client.begin(broadcast, steps=len(batches)) #   any loop that calls optimizer.step()
upload = client.finish(optimizer)
client.save("client.safetensors")                       # before the upload is sent, if the site may be restarted

The server is in `fedllm.deployment.server`. docs/guides/sites/own_program.md shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import EXACT, PLAIN, DownloadsSettings, UploadsSettings
from fedllm.aggregation.upload_checks import fault, misfit
from fedllm.algorithms.base import Algorithm, RoundInfo, lengths
from fedllm.blocks import BlockPartition, RoleError, partition
from fedllm.common.errors import UserError
from fedllm.common.tensors import State
from fedllm.deployment.ledger import Ledger
from fedllm.deployment.messages import Broadcast, Upload, check_broadcast, terms
from fedllm.deployment.optimizer import FederatedOptimizer
from fedllm.federation.info import run_info
from fedllm.models.fingerprint import fingerprint
from fedllm.models.flat_parameters import ParameterSpace

__all__ = ["Broadcast", "Client", "FederatedOptimizer", "Upload", "full_gradient", "model_blocks", "model_info"]

Loss = Callable[[nn.Module, Any], Tensor]


class Client:
    """A site with its own model and data. It keeps its vectors {name: [1, d] or [1, B]} between rounds.

    info: must equal the server's, see model_info. If the algorithm sends block means and info has no blocks, the blocks
    of `model` are used. samples: number of samples that the site holds, for `weights: size`. gradient: the full local
    gradient [d] at x0 (see full_gradient), required under `tracking_init: gradient`. state: the vectors of an earlier
    session; None for a new client. uploads, downloads: what happens to the vectors that are sent and received, as at
    the server. number: the client's, 0 to N - 1, on which the random rounding of `uploads.bits` depends. privacy: what
    this client asks of the server; None where it does not compare it. Raises UserError if any of these does not fit.

    The client stores the states before and after each upload of a round. The next broadcast, made by
    `server.broadcast(client)`, names the last upload that counted, and the client restores its state, see Ledger.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        info: RoundInfo,
        *,
        samples: int = 1,
        gradient: Tensor | None = None,
        state: State | None = None,
        uploads: UploadsSettings = PLAIN,
        downloads: DownloadsSettings = EXACT,
        number: int = 0,
        privacy: PrivacySettings | None = None,
    ) -> None:
        if privacy is not None and privacy.level == "sample":
            raise UserError(
                "privacy.level: found sample, expected client: a loop of your own computes its gradients itself, and "
                "must clip and noise those of single samples; `fedllm site` does it for a recipe"
            )
        self.model, self.algorithm, self.samples = model, algorithm, int(samples)
        self.uploads, self.downloads, self.number, self.privacy = uploads, downloads, number, privacy
        x = ParameterSpace.of(model).gather(model)
        if info.blocks.dim != len(x):
            raise UserError(
                f"info.blocks: found {info.blocks.dim:,} coordinates, expected {len(x):,}, the model's size"
            )
        no_blocks = info.blocks.num_blocks == info.blocks.dim
        self.info = replace(info, blocks=model_blocks(algorithm, model) or info.blocks) if no_blocks else info
        first = self._first(x, gradient) if state is None else state
        kept = lengths(algorithm.client_vectors(), x, self.info)
        if why := misfit(first, {name: (1, size) for name, size in kept.items()}, x.dtype):
            raise UserError(f"state: {why}")
        self._ledger = Ledger(first, kept, x.dtype)

    @property
    def state(self) -> State:
        """The vectors {name: [1, d] or [1, B]} that the next round begins with."""
        return self._ledger.state

    @state.setter
    def state(self, state: State) -> None:
        self._ledger.state = state

    def _first(self, x: Tensor, gradient: Tensor | None) -> State:
        if not self.algorithm.needs_full_gradient():
            return self.algorithm.init_clients(x[None], self.info)
        require_gradient(gradient, x, "Client(..., gradient=full_gradient(model, x0, batches))")
        assert gradient is not None
        return self.algorithm.init_clients(x[None], self.info, gradient[None])

    def begin(self, broadcast: Broadcast, steps: int) -> FederatedOptimizer:
        """Sets the model to the broadcast and returns the optimizer of this round.

        Raises UserError for a broadcast that does not fit, and if this client has no state for the upload that the
        broadcast names as the last counted. The client is then as before."""
        x = ParameterSpace.of(self.model).gather(self.model)
        check_broadcast(
            broadcast,
            x,
            self.algorithm,
            self.info,
            uploads=self.uploads,
            downloads=self.downloads,
            privacy=self.privacy,
        )  # before the state follows what it says
        self._settle(broadcast)
        given = (self.model, self.algorithm, self.info, broadcast, self.state, steps)
        return FederatedOptimizer(*given, uploads=self.uploads, downloads=self.downloads, number=self.number)

    def finish(self, optimizer: FederatedOptimizer, tracked: bool = True) -> Upload:
        """Ends the round: stores the client's new vectors and returns its upload.

        Raises RunError, naming the tensor, if either is not finite; the state is then unchanged."""
        upload, kept = optimizer.end(tracked, self.samples)
        self._ledger = self._ledger.after(upload.receipt, kept)
        return upload

    def _settle(self, broadcast: Broadcast) -> None:
        """Restores the state of the last upload that counted, if the broadcast names one."""
        self._ledger.settle(broadcast)

    def save(self, path: str | Path) -> None:
        """Writes the client's states to a file, atomically. Raises RunError if the file cannot be written."""
        self._ledger.save(path, terms(self.algorithm, self.info, self.uploads, self.downloads))

    def load(self, path: str | Path) -> None:
        """Restores what `save` wrote. Raises UserError, naming the file, if it is damaged or of another federation."""
        self._ledger.load(path, terms(self.algorithm, self.info, self.uploads, self.downloads))

    def fit(
        self,
        broadcast: Broadcast,
        batches: Sequence[Any] | Iterable[Any],
        loss: Loss | None = None,
        tracked: bool = True,
    ) -> Upload:
        """Trains one round, one step per batch, and returns the upload.

        loss(model, batch) returns a scalar; the default is model(**batch).loss, as in Hugging Face models. The model's
        train or eval mode is not changed: call model.train() first for dropout.
        """
        batches = list(batches)
        optimizer = self.begin(broadcast, steps=len(batches))
        for batch in batches:
            optimizer.zero_grad()
            found = (loss or _own_loss)(self.model, batch)
            found.backward()  # type: ignore[no-untyped-call]
            optimizer.step(found.detach)
        return self.finish(optimizer, tracked)


def full_gradient(model: nn.Module, x: Tensor, batches: Sequence[Any], loss: Loss | None = None) -> Tensor:
    """Computes the gradient [d] at x [d] of the mean loss over `batches`. Every batch has the same weight.

    The model's parameters are x afterwards. Its train or eval mode is not changed: call model.eval() first to disable
    dropout.
    """
    space = ParameterSpace.of(model)
    space.scatter(model, x)
    model.zero_grad()
    for batch in batches:
        ((loss or _own_loss)(model, batch) / len(batches)).backward()  # type: ignore[no-untyped-call]
    found = space.gather(model, grad=True)
    model.zero_grad()
    return found


def model_info(
    algorithm: Algorithm,
    model: nn.Module,
    *,
    rounds: int,
    num_clients: int,
    sampled: int,
    tracked: int | None = None,
    local_steps: int,
) -> RoundInfo:
    """Builds the RoundInfo on which a Client and the Server must agree, for a federation that trains `model`.

    Server and clients each call it. A client reports the first difference when a broadcast was made with another info.
    info.model is a digest of the trainable parameters' names and shapes, the adapters' scaling, and a sample of each
    frozen weight. replace(info, model="") turns this comparison off, for sites whose base models differ on purpose, for
    example if some are quantised.

    rounds: number of rounds of the run. num_clients: N. sampled: S, clients per round. tracked: T of these, default S.
    local_steps: K, the most steps that a client takes per round. Raises UserError for numbers that do not fit together
    or do not fit the algorithm, or for a model with weights of unknown role.
    """
    blocks = model_blocks(algorithm, model) or BlockPartition.elementwise(ParameterSpace.of(model).dim)
    info = run_info(
        blocks, rounds=rounds, num_clients=num_clients, sampled=sampled, tracked=tracked, local_steps=local_steps
    )
    algorithm.check(info)
    return replace(info, model=fingerprint(model))


def model_blocks(algorithm: Algorithm, model: nn.Module) -> BlockPartition | None:
    """The block partition of the model that the algorithm needs; None if the algorithm uses no blocks."""
    if not algorithm.needs_blocks():
        return None
    try:
        return partition(model, scheme=getattr(algorithm, "blocks", "hessian"))
    except RoleError as error:
        raise UserError(
            f"{error}, as info=replace(info, blocks=partition(model, unknown='tensor')) for the server and every client"
        ) from error


def require_gradient(gradient: Tensor | None, x: Tensor, how: str) -> None:
    """Raises UserError if the full gradient for `tracking_init: gradient` is missing or does not fit x [d]."""
    if gradient is None:
        raise UserError(f"tracking_init: gradient starts from full gradients at x0: give them, {how}")
    if why := fault({"gradient": gradient}, {"gradient": len(x)}, x.dtype):
        raise UserError(why)


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss

"""The vectors that one client keeps between rounds, with the uploads that they came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fedllm.aggregation.upload_checks import faults
from fedllm.common import tensor_file
from fedllm.common.errors import UserError
from fedllm.common.tensors import State, under
from fedllm.deployment.messages import Broadcast, Terms, disagreement

_HEAD = {"receipts", "round", "terms"}


class Ledger:
    """A client's state {name: [1, n]} before and after each upload of a round.

    The server may never count an upload: it may be lost, late or rejected. The state must then be the one from before
    that upload. So the states before and after each upload of a round are kept. A broadcast made for this client names
    its last upload that counted, and `settle` restores the state of that upload.

    lengths: the expected names of a state's vectors with their numbers of values, of dtype `dtype`.
    """

    def __init__(self, state: State, lengths: Mapping[str, int], dtype: torch.dtype) -> None:
        self.state = state
        self._lengths, self._dtype = dict(lengths), dtype
        self._receipt = ""  # of the upload that produced `state`; "" before the first upload
        self._round = -1  # the last round begun
        self._others: dict[str, State] = {}  # earlier states by receipt, to restore if that upload does not count

    def settle(self, broadcast: Broadcast) -> None:
        """Restores the state of the last upload that counted, if the broadcast names one.

        Raises UserError if there is no state of that upload."""
        states = {**self._others, self._receipt: self.state}
        counted = self._receipt if broadcast.counted is None or not self._lengths else broadcast.counted
        if counted not in states:
            raise UserError(
                f"broadcast of round {broadcast.round}: the last upload of this client that counted is "
                f"{counted[:12] or 'none'}, but its state came with {self._receipt[:12] or 'none'}; load the newest "
                "that Client.save wrote, or none where the federation begins anew; to go on all the same, begin with "
                "replace(broadcast, counted=None)"
            )
        self._receipt, self.state = counted, states.pop(counted)
        self._others = states if broadcast.round == self._round else {}  # uploads of earlier rounds can no longer count
        self._round = broadcast.round

    def after(self, receipt: str, kept: State) -> Ledger:
        """The ledger after an upload with this receipt, whose client keeps `kept`. This ledger does not change."""
        new = Ledger(kept, self._lengths, self._dtype)
        new._others = {**self._others, self._receipt: self.state}
        new._receipt, new._round = receipt, self._round
        new._others.pop(receipt, None)
        return new

    def save(self, path: str | Path, terms: Terms) -> None:
        """Writes the states to a file, atomically. Raises RunError if the file cannot be written."""
        states = {**self._others, self._receipt: self.state}
        head = {"receipts": list(states), "round": self._round, "terms": terms}
        tensors = {f"{place}/{name}": v for place, kept in enumerate(states.values()) for name, v in kept.items()}
        tensor_file.write(path, tensor_file.pack(head, tensors))

    def load(self, path: str | Path, terms: Terms) -> None:
        """Restores what `save` wrote. Raises UserError, naming the file, if it is damaged or of another federation."""
        head, tensors = tensor_file.read(path)
        if head.keys() != _HEAD:
            raise UserError(f"{path}: found {sorted(head)}, expected what Client.save writes")
        if why := disagreement(head["terms"], terms):
            raise UserError(f"{path}: {why}; the file is of another federation")
        states = {receipt: under(f"{place}/", tensors) for place, receipt in enumerate(head["receipts"])}
        for state in states.values():
            if why := faults(state, self._lengths, self._dtype, 1).get(0):
                raise UserError(f"{path}: {why}")
        self._receipt, self.state = states.popitem()
        self._others, self._round = states, head["round"]

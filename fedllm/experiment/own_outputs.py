"""Outputs of models that differ from client to client, each for its client's own samples."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedllm.common.console import line_now_and_then
from fedllm.common.memory import HalvingBatches
from fedllm.experiment.own_parts import OwnParts
from fedllm.experiment.personal import client_heads, personal_model
from fedllm.experiment.session import Session
from fedllm.federation.finetuning import finetune
from fedllm.federation.local_training import Progress, client_too_large
from fedllm.federation.sampling import deal


def own_outputs(session: Session, own: OwnParts, steps: int) -> Tensor:
    """Outputs [n, L] for the clients' own samples [n], on the CPU and in every process.

    Each client's are those of its own copy of the model after so many local steps, see finetune. It begins with the
    client's own head, where the recipe keeps it local; with the server's, where the client never trains. The clients
    are divided among the processes and trained together as in a round.
    """
    job, state, executor = session.job, session.state, session.executor
    problem, samples = job.problem, own.samples
    heads = None if problem.personal is None else client_heads(job, state, executor)
    setup = job.setup
    dealt = deal({c: 1.0 + len(own.places[c]) for c in own.scored}, session.facts.shares)

    stepped = _told(steps * sum(len(part) for part in executor.own(dealt)))

    def outputs_of(clients: list[int]) -> list[Tensor]:
        X = torch.stack(
            [state.x if heads is None or c >= own.training else personal_model(job, state.x, heads[c]) for c in clients]
        )
        buffers = None if state.buffers is None else state.buffers.repeat(len(clients), 1)
        X = finetune(setup, X, clients, state.round, steps, buffers, stepped) if steps else X
        return [
            problem.outputs(
                X[row], samples.take(torch.from_numpy(own.places[c])), buffers=None if buffers is None else buffers[row]
            )
            for row, c in enumerate(clients)
        ]

    def work() -> tuple[Tensor, int]:
        width = problem.outputs(state.x, samples.take(torch.tensor([0])), buffers=state.buffers).shape[1]
        found = torch.zeros(len(samples), width)
        for part in executor.own(dealt):
            too_large = partial(client_too_large, smaller_steps=problem.smaller_steps)
            for clients, outputs in HalvingBatches(part, session.facts.stacked_clients, too_large).each(outputs_of):
                for client, rows in zip(clients, outputs, strict=True):
                    found[torch.from_numpy(own.places[client])] = rows
        return found, problem.eval_cuts

    mine, cuts = executor.together(work, lambda rank: "evaluating the clients")
    problem.eval_cuts = max(cuts)
    return executor.sum_parts([mine], executor.size, mine)


def _told(total: int) -> Progress:
    """Prints now and then how many of the client-steps are done."""
    tell, done = line_now_and_then("client-steps of fine-tuning", total), 0

    def stepped(clients: int) -> None:
        nonlocal done
        done += clients
        tell(min(done, total))  # done > total if clients were trained again, see HalvingBatches

    return stepped

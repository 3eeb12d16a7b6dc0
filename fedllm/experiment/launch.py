"""Creates the executor of a run: for this process alone, or for all processes that a launcher started."""

from __future__ import annotations

from fedllm.common.console import console
from fedllm.config.settings import RunSettings
from fedllm.distributed.collectives import Collectives
from fedllm.distributed.process_group import find_device, open_group, rank, size
from fedllm.federation.executor import Executor


def executor_for(settings: RunSettings) -> Executor:
    """The executor of this process. Every process of torchrun, accelerate launch or srun calls this.

    Only rank 0 prints from then on. settings: the `run:` section; the process group uses its device and timeout.
    """
    if size() == 1:
        return Executor()
    cpu = settings.device == "cpu"
    open_group(cpu=cpu, timeout=settings.timeout)
    console.quiet = rank() > 0
    return Collectives(find_device(cpu=cpu), settings.timeout)

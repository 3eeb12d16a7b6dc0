"""Public names for a federation's server, for use with any transport; usage is in `fedllm.deployment.server`."""

from fedllm.deployment.server import Server
from fedllm.federation.sampling import sample

__all__ = ["Server", "sample"]

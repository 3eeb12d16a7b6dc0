"""Every algorithm written out plainly, client by client and step by step, from ALGORITHMS.md, not from fedllm's code.

Slow and repetitive on purpose: one function an algorithm, each client a dict entry of 1-D float64 tensors, nothing
shared but the bookkeeping in script.py and the plain SGD under the servers of server.py. It imports nothing of fedllm.
"""

from .adam import fa_nt, fadamgc, fadamgc_b, fedadamw, fedlada, localadam, localadamw
from .script import Script
from .server import fedadagrad, fedadam, fedams, fedyogi
from .sgd import fedavg, fedavgm, fedcm, feddyn, fedprox, moon, padamfed, qfedavg, scaffold, scaffoldm

ALGORITHMS = {
    function.__name__: function
    for function in (
        fa_nt, fadamgc, fadamgc_b, fedadagrad, fedadam, fedadamw, fedams, fedavg, fedavgm, fedcm, feddyn, fedlada,
        fedprox, fedyogi, localadam, localadamw, moon, padamfed, qfedavg, scaffold,
        scaffoldm,
    )
}  # fmt: skip

__all__ = ["ALGORITHMS", "Script"]

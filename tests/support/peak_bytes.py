"""The peak of torch's memory inside a piece of work."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that torch has at once inside `work`, beside those that it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = most = 0
    for event in events:
        held += event.nbytes()
        most = max(most, held)
    return most

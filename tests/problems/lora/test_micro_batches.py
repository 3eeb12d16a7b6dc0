"""Who takes which samples, and how batches are cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedllm.data.client_batches import ClientBatches
from fedllm.problems.lora.micro_batches import micro_batches

PARTS = [np.arange(0, 10), np.arange(10, 13), np.arange(13, 14)]


def test_an_epoch_is_every_sample_once_and_steps_follow_the_size() -> None:
    batches = ClientBatches(PARTS, batch_size=4, epochs=2, steps=None, seed=0)
    assert [batches.steps(client) for client in range(3)] == [6, 2, 2]
    first = np.concatenate([batches.indices(0, 0, step) for step in range(3)])
    second = np.concatenate([batches.indices(0, 0, step) for step in range(3, 6)])
    assert sorted(first) == sorted(second) == list(range(10))
    assert list(first) != list(second)
    assert [len(batches.indices(0, 0, step)) for step in range(3)] == [4, 4, 2]


def test_steps_are_the_same_for_all_and_small_clients_go_round() -> None:
    batches = ClientBatches(PARTS, batch_size=4, epochs=None, steps=5, seed=0)
    assert [batches.steps(client) for client in range(3)] == [5, 5, 5]
    assert all(set(batches.indices(1, 3, step)) == {10, 11, 12} for step in range(5))


def test_order_depends_on_seed_round_and_client_only() -> None:
    def order(seed: int, round: int) -> list[int]:
        batches = ClientBatches(PARTS, batch_size=10, epochs=1, steps=None, seed=seed)
        batches.indices(1, 5, 0)
        return [int(i) for i in batches.indices(0, round, 0)]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_micro_batches_hold_every_sample_once_and_never_cut_one(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    lengths = np.array(data.draw(st.lists(st.integers(1, 60), min_size=sum(sizes), max_size=sum(sizes))))
    slices = data.draw(st.none() | st.integers(1, 5))
    batches = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    found = micro_batches(batches, lengths, overhead=20.0, slices=slices)
    for client, batch in enumerate(batches):
        samples = np.concatenate([micro.samples[client] for micro in found])
        slots = np.concatenate([micro.slots[client] for micro in found])
        assert sorted(samples[samples >= 0]) == sorted(batch)
        assert all(batch[slot] == sample for slot, sample in zip(slots, samples, strict=True) if sample >= 0)
    for micro in found:
        real = micro.samples[micro.samples >= 0].numpy()
        assert micro.length == (lengths[real].max() if len(real) else 1)


def test_cuts_minimise_padded_tokens_plus_overhead() -> None:
    lengths = np.array([2, 2, 2, 50])
    cut = micro_batches([np.arange(4)], lengths, overhead=10.0)
    assert [(micro.samples.shape[1], micro.length) for micro in cut] == [(3, 2), (1, 50)]
    whole = micro_batches([np.arange(4)], lengths, overhead=1000.0)
    assert [(micro.samples.shape[1], micro.length) for micro in whole] == [(4, 50)]

"""Every sample once an epoch, batches of near lengths within their limit, and the same order whatever the ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_transformer.data.batches import LengthBuckets, in_order
from hvd_transformer.data.sampler import Replica

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=200).map(lambda values: np.array(values, np.int64))


@given(lengths, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 150)), st.integers(0, 3))
def test_each_sample_once_within_the_limit(values, batch_size, batch_tokens, epoch) -> None:
    batches = LengthBuckets(values, batch_size, batch_tokens, seed=7)
    items = [batches.item(epoch, number) for number in range(batches.num_items)]
    assert sorted(np.concatenate(items)) == list(range(len(values)))
    for item in items:
        if batch_tokens is None:
            assert len(item) <= batch_size
        else:
            assert len(item) == 1 or len(item) * values[item].max() <= batch_tokens
    # Sorted, the batches lie one behind the other: no length is between those of another batch.
    ordered = sorted(items, key=lambda item: (values[item].min(), values[item].max()))
    for before, after in zip(ordered, ordered[1:], strict=False):
        assert values[before].max() <= values[after].min()


@given(lengths, st.integers(1, 150))
def test_a_batch_is_as_full_as_the_limit_allows(values, batch_tokens) -> None:
    """One sample more, the next in length, would not fit."""
    batches = LengthBuckets(values, 1, batch_tokens, seed=0)
    ordered = np.sort(values)
    for end in batches.ends[:-1]:
        start = ([0, *batches.ends])[batches.ends.index(end)]
        assert (end - start + 1) * ordered[end] > batch_tokens


def test_the_order_is_of_seed_and_epoch() -> None:
    values = np.random.default_rng(0).integers(1, 20, 300)

    def order(seed: int, epoch: int) -> list[list[int]]:
        batches = LengthBuckets(values, 8, None, seed)
        return [batches.item(epoch, number).tolist() for number in range(batches.num_items)]

    assert order(1, 0) == order(1, 0)
    assert len({str(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    # The samples of one batch, too, are others in another epoch.
    assert {frozenset(item) for item in order(1, 0)} != {frozenset(item) for item in order(1, 1)}


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_evaluation_has_each_sample_once_over_the_replicas(size: int) -> None:
    values = np.random.default_rng(0).integers(1, 20, 100)
    parts = [list(in_order(values, 8, None, Replica(rank, size))) for rank in range(size)]
    whole = list(in_order(values, 8, None, Replica(0, 1)))
    assert [item.tolist() for part in parts for item in part] == [item.tolist() for item in whole]
    assert sorted(np.concatenate(whole)) == list(range(100))

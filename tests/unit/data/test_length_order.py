"""Length buckets against a plain sort and a plain cut of every sample; equal work of simulated ranks."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.data import length_order
from hvd_transformer.data.batches import LengthBuckets, dealt_batches
from hvd_transformer.data.length_order import Cut, LengthOrder, order_dtype, write_length_order
from hvd_transformer.data.sampler import Replica

Lengths = np.ndarray
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=200).map(lambda values: np.array(values, np.int64))
limits = st.one_of(st.none(), st.integers(1, 400))


def plain_cut(values: Lengths, batch_size: int, batch_tokens: int | None) -> list[range]:
    """One sample after the other."""
    ordered, batches, start = np.sort(values).tolist(), [], 0
    for place in range(len(ordered)):
        size = place + 1 - start
        fits = size <= batch_size if batch_tokens is None else size * ordered[place] <= batch_tokens
        if not fits and size > 1:
            batches.append(range(start, place))
            start = place
    return [*batches, range(start, len(ordered))]


@settings(max_examples=300)
@given(lengths, st.integers(1, 9), limits)
def test_the_cut_is_that_of_a_loop_over_the_samples(values: Lengths, batch_size: int, batch_tokens: int | None) -> None:
    cut = Cut(LengthOrder.of(values), batch_size, batch_tokens)
    wanted = plain_cut(values, batch_size, batch_tokens)
    assert [cut[number] for number in range(len(cut))] == wanted
    ordered = np.sort(values)
    tokens = [(places, len(places) * ordered[places[-1]]) for places in wanted]
    assert list(cut.longest_first()) == tokens[::-1]


def test_the_table_of_a_cut_grows_with_the_different_lengths_alone() -> None:
    counts = np.full(50, 10**9)
    order = LengthOrder(np.broadcast_to(np.uint32(0), 50 * 10**9), np.arange(1, 51), counts)
    tracemalloc.start()
    cut = Cut(order, 8, 1000)
    places = [cut[number] for number in (0, len(cut) // 2, len(cut) - 1)]
    assert tracemalloc.get_traced_memory()[1] < 10**5
    tracemalloc.stop()
    assert places[0] == range(1000) and places[-1].stop == 50 * 10**9
    assert order.num_tokens == 10**9 * 50 * 51 // 2


@settings(max_examples=200)
@given(lengths, st.integers(1, 250), st.integers(1, 50))
def test_the_first_samples_are_ordered_as_if_there_were_no_others(values: Lengths, count: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_order, "_CHUNK", chunk)
        found = LengthOrder.of(values).first(count)
    wanted = LengthOrder.of(values[:count])
    for part in ("numbers", "lengths", "ends"):
        assert getattr(found, part).tolist() == getattr(wanted, part).tolist()


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 50))
def test_a_counting_sort_chunk_by_chunk_is_a_stable_sort(
    tmp_path_factory: pytest.TempPathFactory, values: Lengths, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("order") / "order.bin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_order, "_CHUNK", chunk)
        asked: list[int] = []

        def part(start: int, stop: int) -> Lengths:
            asked.append(stop - start)
            return values[start:stop]

        histogram = write_length_order(path, len(values), part)
    assert np.fromfile(path, order_dtype(len(values))).tolist() == np.argsort(values, kind="stable").tolist()
    assert histogram.tolist() == np.bincount(values).tolist()
    assert max(asked) <= chunk
    order, again = LengthOrder.sorted_before(np.fromfile(path, "<u4"), histogram), LengthOrder.of(values)
    assert order.samples(0, len(values)).tolist() == again.samples(0, len(values)).tolist()
    assert order.lengths.tolist() == again.lengths.tolist() and order.ends.tolist() == again.ends.tolist()
    assert order.num_tokens == values.sum()


def test_files_that_do_not_fit_together_are_noticed() -> None:
    with pytest.raises(ValueError, match="3 samples, but the lengths of 4"):
        LengthOrder.sorted_before(np.arange(3), np.array([0, 4]))


@given(lengths, st.integers(1, 9), limits, st.integers(0, 3))
def test_each_sample_once_within_the_limit(
    values: Lengths, batch_size: int, batch_tokens: int | None, epoch: int
) -> None:
    batches = LengthBuckets(LengthOrder.of(values), batch_size, batch_tokens, seed=7)
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


@pytest.mark.parametrize("batch_tokens", [None, 100])
def test_the_samples_of_a_batch_are_of_seed_and_epoch(batch_tokens: int | None) -> None:
    values = np.random.default_rng(0).integers(1, 20, 300)

    def items(seed: int, epoch: int) -> list[list[int]]:
        batches = LengthBuckets(LengthOrder.of(values), 8, batch_tokens, seed)
        return [batches.item(epoch, number).tolist() for number in range(batches.num_items)]

    assert items(1, 0) == items(1, 0)
    every = [items(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({str(sorted(map(sorted, order))) for order in every}) == 4


def test_over_the_epochs_a_sample_meets_all_of_its_length() -> None:
    values = np.repeat([3, 4], 50)
    batches = LengthBuckets(LengthOrder.of(values), 10, None, seed=1)
    met = set()
    for epoch in range(60):
        items = [batches.item(epoch, number).tolist() for number in range(batches.num_items)]
        met |= next(set(item) for item in items if 0 in item)
    assert met == set(range(50))


def test_labels_that_are_sorted_in_the_file_are_mixed_and_so_are_lengths() -> None:
    """The first half of the samples has one label, the second half the other; their lengths are alike."""
    values = np.random.default_rng(0).integers(5, 60, 4000)
    batches = LengthBuckets(LengthOrder.of(values), 16, None, seed=3)
    shares, mean_lengths = [], []
    for plan in batches.sampler(4, Replica()).epoch():
        step = np.concatenate([batches.item(0, item) for part in plan.accumulation for item in part])
        shares.append((step < 2000).mean())
        mean_lengths.append(values[step].mean())
    # 64 samples per step: the standard deviation of a fair draw is 0.0625.
    assert np.std(shares) < 1.5 * 0.0625 and abs(np.mean(shares) - 0.5) < 0.02
    halves = np.mean(shares[: len(shares) // 2]), np.mean(shares[len(shares) // 2 :])
    assert abs(halves[0] - halves[1]) < 0.05
    halves = np.mean(mean_lengths[: len(shares) // 2]), np.mean(mean_lengths[len(shares) // 2 :])
    assert abs(halves[0] - halves[1]) < 10  # in the order by length, 27


def pairs_of_sentences(kind: str, count: int) -> Lengths:
    """Tokens of the longer side: Multi30k's image captions, or WMT's news, which are longer and vary more."""
    rng = np.random.default_rng(2)
    mean, deviation = {"multi30k": (2.65, 0.32), "wmt": (3.2, 0.65)}[kind]
    return np.clip(np.exp(rng.normal(mean, deviation, count)).round(), 1, 256).astype(np.int64)


@pytest.mark.parametrize("kind", ["multi30k", "wmt"])
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("batch_tokens", [None, 1500])
def test_replicas_have_the_same_work(kind: str, size: int, batch_tokens: int | None) -> None:
    """Tokens including padding, of the slowest replica over the mean; steps end together, evaluations as a whole."""
    values, held_out = (
        pairs_of_sentences(kind, {"multi30k": 29_000, "wmt": 120_000}[kind]),
        pairs_of_sentences(kind, 1014),
    )

    def work(numbers: Lengths, of: Lengths) -> int:
        return len(numbers) * int(of[numbers].max())

    loads = [
        sum(work(numbers, held_out) for numbers in dealt_batches(LengthOrder.of(held_out), 8, batch_tokens, replica))
        for replica in (Replica(rank, size) for rank in range(size))
    ]
    assert max(loads) <= 1.1 * np.mean(loads)

    batches = LengthBuckets(LengthOrder.of(values), 8, batch_tokens, seed=1)
    slowest = mean = 0.0
    for plans in zip(*(batches.sampler(size, Replica(rank, size)).epoch() for rank in range(size)), strict=True):
        own = [sum(work(batches.item(0, item), values) for [item] in plan.accumulation) for plan in plans]
        if all(own):  # the last step of an epoch has what is left
            slowest, mean = slowest + max(own), mean + np.mean(own)
    assert slowest <= 1.1 * mean


@given(lengths, st.integers(1, 9), limits, st.integers(1, 9))
def test_evaluation_has_each_sample_once_over_the_replicas(
    values: Lengths, batch_size: int, batch_tokens: int | None, size: int
) -> None:
    order = LengthOrder.of(values)
    parts = [list(dealt_batches(order, batch_size, batch_tokens, Replica(rank, size))) for rank in range(size)]
    assert Counter(number for part in parts for numbers in part for number in numbers) == Counter(range(len(values)))
    for numbers in (numbers for part in parts for numbers in part):
        if batch_tokens is None:
            assert len(numbers) <= batch_size
        else:
            assert len(numbers) == 1 or len(numbers) * values[numbers].max() <= batch_tokens


def test_one_replica_evaluates_whole_batches() -> None:
    values = np.arange(1, 21)
    found = [numbers.tolist() for numbers in dealt_batches(LengthOrder.of(values), 8, None, Replica())]
    assert found == [list(range(16, 20)), list(range(8, 16)), list(range(8))]

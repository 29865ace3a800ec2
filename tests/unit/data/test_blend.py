"""Mixtures: the order against a sorted list of when each sample is due, and the samples against each source alone."""

import time
from collections import Counter
from fractions import Fraction
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.data.batches import WindowDataset
from hvd_transformer.data.blend import Blend, BlendedDataset, blend_sizes
from hvd_transformer.data.sampler import Replica, StepSampler

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any)


@settings(deadline=None, max_examples=150)
@given(SIZES, st.data())
def test_each_place_takes_the_sample_that_is_due_first(sizes: list[int], data: st.DataObject) -> None:
    blend = Blend(sizes)
    golden = (5**0.5 - 1) / 2
    due = {
        (source, number): (number + (0.5 + source * golden) % 1) / size
        for source, size in enumerate(sizes)
        for number in range(size)
    }
    wanted = sorted(due, key=lambda sample: (due[sample], sample))
    assert blend[range(blend.num_items)] == wanted
    start = data.draw(st.integers(0, blend.num_items))
    stop = data.draw(st.integers(start, blend.num_items))
    assert blend[range(start, stop)] == wanted[start:stop]


@settings(deadline=None, max_examples=100)
@given(SIZES)
def test_no_source_is_ever_far_from_its_share(sizes: list[int]) -> None:
    """As with Megatron-LM's rule, whose largest distance for the same weights is computed here, to a sample."""
    blend, total = Blend(sizes), sum(sizes)
    theirs, counts, furthest = [0] * len(sizes), [0] * len(sizes), [Fraction(0), Fraction(0)]
    for place, (source, _) in enumerate(blend[range(total)], start=1):
        lacking = [Fraction(size * place, total) - count for size, count in zip(sizes, theirs, strict=True)]
        theirs[max(range(len(sizes)), key=lacking.__getitem__)] += 1
        counts[source] += 1
        for index, own in enumerate((counts, theirs)):
            apart = max(abs(Fraction(size * place, total) - count) for size, count in zip(sizes, own, strict=True))
            furthest[index] = max(furthest[index], apart)
    assert counts == theirs == sizes
    assert furthest[0] <= furthest[1] + 1


def test_any_place_of_a_huge_epoch_is_found_at_once() -> None:
    sizes = [7 * 10**11 + 1, 3 * 10**11 + 7, 5, 10**9 + 9]
    blend, began = Blend(sizes), time.process_time()
    for position in (0, 1, 10**6 + 3, blend.num_items // 2, blend.num_items - 3):
        around = blend[range(position, position + 3)]
        after = blend.counts(position + 3)
        assert sum(after) == position + 3
        counted = Counter(source for source, _ in around)
        assert [count - counted[source] for source, count in enumerate(after)] == blend.counts(position)
    assert blend.counts(blend.num_items) == sizes
    assert time.process_time() - began < 10  # a walk from the start would take days


def test_the_next_samples_of_many_sources_are_found_at_once() -> None:
    """A batch must not look at every source for each of its samples."""

    class Counted(Blend):
        num_looks = 0

        def _due(self, source: int, number: int) -> float:
            self.num_looks += 1
            return super()._due(source, number)

    blend = Counted(range(1, 1001))
    blend[range(250_000, 250_100)]
    assert blend.num_looks < 10 * 1000


@pytest.mark.parametrize(
    ("available", "weights", "epochs", "wanted"),
    [
        ([100, 30], [None, None], [1, 1], [100, 30]),
        ([100, 30], [None, None], [1, 2.5], [100, 75]),
        ([100, 30], [7, 3], [1, 1], [70, 30]),  # the second one ends first
        ([100, 30], [0.7, 0.3], [1, 2], [100, 43]),  # now the first one
        ([100, 30], [0, 2], [1, 1], [0, 30]),
        ([10, 10**6], [1, 1e-9], [1, 1], [10, 1]),
    ],
)
def test_how_much_of_each_source_an_epoch_has(
    available: list[int], weights: list[float | None], epochs: list[float], wanted: list[int]
) -> None:
    assert blend_sizes(available, weights, epochs) == wanted


def sources() -> list[WindowDataset]:
    """Tokens tell the source and the place."""
    texts = [np.arange(count, dtype="<u2") + 1000 * number for number, count in enumerate((83, 131, 47))]
    return [WindowDataset(text, 4, number) for number, text in enumerate(texts)]


def test_a_source_goes_on_in_the_next_epoch_and_is_read_as_a_whole_before_it_comes_again() -> None:
    sizes = [11, 5, 30]
    mixed = BlendedDataset(sources(), sizes)
    seen: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    for epoch in range(9):
        inputs, targets = mixed.batch(epoch, range(mixed.num_items))
        assert torch.equal(targets, inputs + 1)
        assert Counter((inputs[:, 0] // 1000).tolist()) == dict(enumerate(sizes))
        for row in inputs.tolist():
            seen[row[0] // 1000].append(row)
    for number, dataset in enumerate(sources()):
        passes = -(-9 * sizes[number] // dataset.num_items)
        assert passes > 1
        alone = chain.from_iterable(
            dataset.batch(one, range(dataset.num_items)).inputs.tolist() for one in range(passes)
        )
        assert seen[number] == list(alone)[: 9 * sizes[number]]


def test_a_mixture_of_one_source_is_that_source() -> None:
    alone = sources()[0]
    mixed = BlendedDataset([alone], [alone.num_items])
    for epoch in range(3):
        for items in (range(alone.num_items), range(2, 5)):
            assert all(map(torch.equal, mixed.batch(epoch, items), alone.batch(epoch, items)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_has_the_same_samples_on_any_number_of_ranks_also_after_a_stop(ranks: int) -> None:
    mixed = BlendedDataset(sources(), [11, 5, 30])
    whole = mixed.batch(1, range(mixed.num_items)).inputs

    def taken(remaining: list[tuple[int, int]] | None) -> list[torch.Tensor]:
        samplers = [StepSampler(mixed.num_items, 8, 3, Replica(rank, ranks)) for rank in range(ranks)]
        steps = zip(*(sampler.epoch(remaining, 1) for sampler in samplers), strict=True)
        return [
            torch.cat([mixed.batch(1, items).inputs for plan in step for items in plan.accumulation]) for step in steps
        ]

    assert all(map(torch.equal, taken(None), whole.split(8)))
    assert all(map(torch.equal, taken([(16, mixed.num_items)]), whole[16:].split(8)))

"""Batches against the text itself, the PyTorch tutorial's own cut, and a file of ten gigabytes."""

import hashlib
import os
import tracemalloc
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_transformer.data.batches import ColumnDataset, WindowDataset, evaluation_batches
from hvd_transformer.data.sampler import Replica, StepSampler
from hvd_transformer.data.token_file import TokenFile


def text(count: int, dtype: str = "<u2") -> np.ndarray:
    """Each token is its place, so that batches show where they come from."""
    return np.arange(count).astype(dtype)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 12), st.integers(0, 150), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_an_epoch_of_windows_is_the_text_cut_from_one_offset(length: int, more: int, seed: int, epoch: int) -> None:
    tokens = text(length + 1 + more)
    windows = WindowDataset(tokens, length, seed)
    inputs, targets = windows.batch(epoch, range(windows.num_items))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (windows.num_items, length)
    # Tokens are places: every row goes up by one, and targets are the places behind.
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(length))
    assert torch.equal(targets, inputs + 1)
    starts = sorted(inputs[:, 0].tolist())
    offset = starts[0]
    assert starts == [offset + length * number for number in range(windows.num_items)]
    assert 0 <= offset < len(tokens) - length * windows.num_items and targets.max().item() < len(tokens)
    # At most two windows fewer than fit (one that does not fit the offset, one that makes room for it).
    assert windows.num_items >= max(1, (len(tokens) - 1) // length - 1)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 5), st.integers(20, 120))
def test_windows_come_in_the_epochs_order_however_they_are_asked_for(
    data: st.DataObject, length: int, count: int
) -> None:
    windows = WindowDataset(text(count), length, 3)
    whole = windows.batch(1, range(windows.num_items)).inputs
    start = data.draw(st.integers(0, windows.num_items - 1))
    stop = data.draw(st.integers(start + 1, windows.num_items))
    assert torch.equal(windows.batch(1, range(start, stop)).inputs, whole[start:stop])


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2900), st.integers(1, 40), st.integers(1, 700)), max_size=4)
)
def test_what_was_asked_for_before_does_not_matter(runs: list[tuple[int, int, int, int]]) -> None:
    """Batches one after the other, of which more are computed ahead, in places and epochs that jump."""
    tokens = text(9000)
    windows = WindowDataset(tokens, 3, 3)
    whole = [WindowDataset(tokens, 3, 3).batch(epoch, range(windows.num_items)).inputs for epoch in range(2)]
    for epoch, first, size, step in runs:
        for start in range(first, min(first + 4 * step, windows.num_items), step):
            items = range(start, min(start + size, windows.num_items))
            assert torch.equal(windows.batch(epoch, items).inputs, whole[epoch][items.start : items.stop])


def test_the_cut_and_the_order_change_with_the_epoch_and_the_seed() -> None:
    tokens = text(1000)
    first = [WindowDataset(tokens, 10, 1).batch(epoch, range(98)).inputs for epoch in range(300)]
    assert {int(inputs.min()) for inputs in first} == set(range(20))
    assert not torch.equal(first[0] - first[0].min(), first[1] - first[1].min())
    assert torch.equal(first[0], WindowDataset(tokens, 10, 1).batch(0, range(98)).inputs)
    other = WindowDataset(tokens, 10, 2).batch(0, range(98)).inputs
    assert not torch.equal(first[0] - first[0].min(), other - other.min())


def test_over_the_epochs_every_token_is_trained_on() -> None:
    windows = WindowDataset(text(31), 10, 1)
    batches = [windows.batch(epoch, range(windows.num_items)) for epoch in range(300)]
    assert set(torch.cat([batch.inputs.flatten() for batch in batches]).tolist()) == set(range(30))
    assert set(torch.cat([batch.targets.flatten() for batch in batches]).tolist()) == set(range(1, 31))


def test_a_text_that_just_fits_is_one_window() -> None:
    windows = WindowDataset(text(6), 5, 1)
    assert windows.num_items == 1
    assert windows.batch(0, range(1)).inputs.tolist() == [[0, 1, 2, 3, 4]]


def test_the_samples_of_an_epoch_do_not_depend_on_the_number_of_replicas() -> None:
    windows = WindowDataset(text(500), 7, 4)

    def samples(size: int, batch_size: int) -> list[list[int]]:
        """Step by step, over all replicas."""
        steps = [
            StepSampler(windows.num_items, batch_size * size, batch_size, Replica(rank, size)).epoch()
            for rank in range(size)
        ]
        return [
            [
                start
                for step in part
                for items in step.accumulation
                for start in windows.batch(2, items).inputs[:, 0].tolist()
            ]
            for part in zip(*steps, strict=True)
        ]

    assert samples(1, 12) == samples(2, 6) == samples(4, 3)


# The PyTorch tutorial's, word for word but for the device.
def batchify(data: Tensor, bsz: int) -> Tensor:
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    return data.view(bsz, -1).t().contiguous()


def get_batch(source: Tensor, i: int, bptt: int) -> tuple[Tensor, Tensor]:
    seq_len = min(bptt, len(source) - 1 - i)
    data = source[i : i + seq_len]
    target = source[i + 1 : i + 1 + seq_len].view(-1)
    return data.t(), target


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 150))
def test_columns_are_the_tutorials_batches(num_columns: int, length: int, more: int) -> None:
    tokens = text(2 * num_columns + more, "<u4")
    columns = ColumnDataset(tokens, num_columns, length)
    source = batchify(torch.from_numpy(tokens.astype(np.int64)), num_columns)
    places = range(0, source.size(0) - 1, length)
    assert columns.num_items == len(places)
    for unit, place in enumerate(places):
        inputs, targets = columns.batch(0, range(unit, unit + 1))
        data, target = get_batch(source, place, length)
        assert torch.equal(inputs, data)
        assert torch.equal(targets.t().flatten(), target)


def test_columns_have_the_same_order_in_every_epoch() -> None:
    columns = ColumnDataset(text(100), 4, 5)
    assert torch.equal(columns.batch(0, range(2, 3)).inputs, columns.batch(7, range(2, 3)).inputs)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_text_shorter_than_two_rows_has_no_columns(count: int) -> None:
    assert ColumnDataset(text(count), 3, 5).num_items == 0


@settings(deadline=None, max_examples=150)
@given(st.integers(2, 200), st.integers(1, 20), st.integers(1, 6), st.integers(1, 5))
def test_evaluation_predicts_every_token_but_the_first_once(
    count: int, length: int, batch_size: int, size: int
) -> None:
    parts = [list(evaluation_batches(text(count), length, batch_size, Replica(rank, size))) for rank in range(size)]
    batches = list(chain.from_iterable(parts))
    assert sorted(chain.from_iterable(batch.targets.flatten().tolist() for batch in batches)) == list(range(1, count))
    for inputs, targets in batches:
        assert torch.equal(targets, inputs + 1) and torch.equal(inputs, inputs[:, :1] + torch.arange(inputs.size(1)))
        assert inputs.size(0) <= batch_size and inputs.size(1) <= length
    # The context of a target does not depend on who has it, nor on the batch.
    contexts = {(int(row[0]), row.numel()) for inputs, _ in batches for row in inputs}
    assert contexts == {(start, min(length, count - 1 - start)) for start in range(0, count - 1, length)}


@settings(deadline=None, max_examples=150)
@given(st.integers(2, 150), st.integers(1, 12), st.integers(1, 9), st.integers(1, 5), st.integers(1, 20))
def test_limited_evaluation_is_that_of_a_shorter_text(
    count: int, length: int, batch_size: int, size: int, most: int
) -> None:
    """On any number of ranks: the first windows."""
    limited = [evaluation_batches(text(count), length, batch_size, Replica(rank, size), most) for rank in range(size)]
    targets = sorted(number for batch in chain.from_iterable(limited) for number in batch.targets.flatten().tolist())
    assert targets == list(range(1, count))[: most * length]


def resident() -> int:
    """Memory of this process that is no mapped file, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


@pytest.fixture
def ten_gigabytes(tmp_path: Path) -> TokenFile:
    """A file of five billion 16-bit tokens, all of it a hole but the `MARKS`."""
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        for number, place in enumerate(MARKS, start=1):
            file.seek(2 * place)
            file.write(number.to_bytes(2, "little"))
    os.truncate(path, 2 * HUGE)
    if path.stat().st_blocks * 512 > 2**20:
        pytest.skip("needs a file system with sparse files")
    return TokenFile(path, "<u2", HUGE, hashlib.sha256().hexdigest())


HUGE = 5_000_000_000
MARKS = [0, 2**31 - 1, 2**32 + 5, HUGE - 1]  # far behind what 32 bits reach


def test_tokens_behind_four_billion_are_found(ten_gigabytes: TokenFile) -> None:
    for number, place in enumerate(MARKS, start=1):
        piece = ten_gigabytes[max(0, place - 2) : place + 1]
        assert piece[-1] == number and not piece[:-1].any()
    columns = ColumnDataset(ten_gigabytes, 4, 35)
    last = columns.batch(0, range(columns.num_items - 1, columns.num_items))
    assert last.targets[3, -1] == 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_ten_gigabytes_of_tokens_train_in_constant_memory(ten_gigabytes: TokenFile) -> None:
    length = 1024
    before = resident()
    tracemalloc.start()
    try:
        windows = WindowDataset(ten_gigabytes, length, 1)
        assert windows.num_items == (HUGE - 1) // length - 1
        sampler = StepSampler(windows.num_items, 16, 8, Replica(1, 2))
        assert sampler.num_steps() == -(-windows.num_items // 16)
        for number in range(8):  # everywhere in the epoch
            step = next(iter(sampler.epoch([(windows.num_items * number // 8, windows.num_items)])))
            assert windows.batch(0, step.accumulation[0]).inputs.shape == (8, length)
        columns = ColumnDataset(ten_gigabytes, 20, 35)
        assert columns.batch(0, range(10**6, 10**6 + 1)).inputs.shape == (20, 35)
        assert sum(1 for _ in evaluation_batches(ten_gigabytes, length, 8, Replica(3, 100_000))) == 7
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * 2**20
    assert resident() - before < 50 * 2**20


def test_evaluation_of_ten_gigabytes_starts_in_constant_memory(ten_gigabytes: TokenFile) -> None:
    tracemalloc.start()
    try:
        next(evaluation_batches(ten_gigabytes, 2**15, 1, Replica()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * 2**20

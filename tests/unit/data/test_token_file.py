"""Several token files are read as if they were one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_transformer.data.batches import WindowDataset, evaluation_batches
from hvd_transformer.data.sampler import Replica
from hvd_transformer.data.token_file import JoinedTokens, TokenFile

NUMBERS = np.arange(100, dtype="<u2")
SIZES = [1, 30, 2, 47, 20]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[TokenFile]:
    """The second one begins within its file."""
    folder, parts = tmp_path_factory.mktemp("tokens"), np.split(NUMBERS, np.cumsum(SIZES)[:-1])
    for number, part in enumerate(parts):
        np.concatenate([np.full(5 * (number == 1), 7, "<u2"), part]).tofile(folder / f"{number}.bin")
    return [
        TokenFile(folder / f"{number}.bin", "<u2", size, str(number), 5 if number == 1 else None)
        for number, size in enumerate(SIZES)
    ]


@given(start=st.integers(-120, 120) | st.none(), stop=st.integers(-120, 120) | st.none())
def test_slices_are_those_of_one_file(files: list[TokenFile], start: int | None, stop: int | None) -> None:
    joined = JoinedTokens(files)
    assert len(joined) == 100
    found = joined[start:stop]
    assert (found.tolist(), found.dtype) == (NUMBERS[start:stop].tolist(), NUMBERS.dtype)


def test_batches_are_those_of_one_file(files: list[TokenFile], tmp_path) -> None:
    NUMBERS.tofile(tmp_path / "one.bin")
    one, joined = TokenFile(tmp_path / "one.bin", "<u2", 100, ""), JoinedTokens(files)
    for tokens, other in zip(
        evaluation_batches(one, 7, 3, Replica(1, 2)), evaluation_batches(joined, 7, 3, Replica(1, 2)), strict=True
    ):
        assert tokens.targets.equal(other.targets)
    data = [WindowDataset(tokens, 7, seed=1) for tokens in (one, joined)]
    assert data[0].batch(2, range(9)).inputs.equal(data[1].batch(2, range(9)).inputs)


def test_few_files_are_mapped_at_a_time(files: list[TokenFile]) -> None:
    joined = JoinedTokens(files, most_mapped=2)
    for file in files:
        file.unmap()
    for start in (0, 20, 60, 90, 10, 99, 31):
        kept = joined[start : start + 3]
        assert kept.tolist() == NUMBERS[start : start + 3].tolist()
        assert sum("_mapped" in vars(file) for file in files) <= 2
    assert not np.shares_memory(joined[0:3], joined[0:3])  # over the end of a file
    assert np.shares_memory(joined[5:8], joined[5:8])

"""Token files: numbers are read as written, and damage is noticed."""

import hashlib

import numpy as np
import pytest

from hvd_transformer.data.build_once import Stopped
from hvd_transformer.data.compressed import BLOCK_BYTES
from hvd_transformer.data.prepared import TokenWriter, token_dtype
from hvd_transformer.data.token_file import TokenFile
from hvd_transformer.errors import UserError


def write(path, numbers, dtype):
    data = np.asarray(numbers).astype(dtype).tobytes()
    path.write_bytes(data)
    return TokenFile(path, dtype, len(numbers), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2, "<u2"), (65536, "<u2"), (65537, "<u4"), (267735, "<u4")])
def test_the_number_format_holds_the_largest_token(vocab_size, dtype, tmp_path):
    assert token_dtype(vocab_size) == dtype
    tokens = write(tmp_path / "x.bin", [0, vocab_size - 1], dtype)
    assert tokens[0:2].tolist() == [0, vocab_size - 1]
    assert tokens.path.stat().st_size == tokens.num_bytes == 2 * int(dtype[-1])


def test_slices(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 60000, 1000)
    tokens = write(tmp_path / "x.bin", numbers, "<u2")
    assert len(tokens) == 1000
    for start, stop in [(0, 1000), (10, 20), (990, 2000), (5, 5)]:
        found = tokens[start:stop]
        assert found.dtype == np.dtype("<u2")
        assert found.tolist() == numbers[start:stop].tolist()
    with pytest.raises(ValueError, match="read-only"):
        tokens[0:2][0] = 1


def test_bytes_are_little_endian(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\x01\x02\x03\x00")
    assert TokenFile(tmp_path / "x.bin", "<u2", 2, "")[:].tolist() == [0x0201, 3]


def test_opened_when_first_read(tmp_path):
    tokens = TokenFile(tmp_path / "later.bin", "<u2", 1, "")
    assert len(tokens) == 1
    (tmp_path / "later.bin").write_bytes(b"\x07\x00")
    assert tokens[0:1].tolist() == [7]


def test_damage(tmp_path):
    tokens = write(tmp_path / "x.bin", range(100), "<u2")
    tokens.path.write_bytes(tokens.path.read_bytes()[:-1])
    assert not tokens.is_whole()
    with pytest.raises(UserError, match="x.bin: damaged, 199 bytes instead of 200"):
        tokens[0:1]
    tokens.path.unlink()
    with pytest.raises(UserError, match="x.bin: damaged, no bytes instead of 200"):
        tokens[0:1]


def test_a_stop_is_noticed_at_each_block_that_a_resume_reads(tmp_path) -> None:
    """The file is left as it is."""
    writer = TokenWriter(tmp_path, "x", "<u2")
    writer.add(np.arange(5 * BLOCK_BYTES // 2))
    entry, asked = writer.close(), []

    def stop_at_the_third() -> bool:
        asked.append(None)
        return len(asked) == 3

    with pytest.raises(Stopped):
        TokenWriter.resume(tmp_path, "x", entry, stop_at_the_third)
    assert len(asked) == 3
    resumed = TokenWriter.resume(tmp_path, "x", entry, lambda: False)
    assert resumed is not None and resumed.close() == entry

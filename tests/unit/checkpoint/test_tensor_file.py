"""The parts of all ranks make one safetensors file that any reader reads, with checksums that are of its bytes."""

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from fragments import whole
from safetensors.torch import load_file

from hvd_transformer.checkpoint import tensor_file
from hvd_transformer.checkpoint.crc import Range, combine, merge
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.checkpoint.tensor_file import FilePart


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_parts_written_side_by_side_make_the_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    wholes = {
        "matrix": torch.randn(60, 8).to(dtype),
        "none": torch.empty(0, 3, dtype=dtype),
        "bias": torch.ones(3).to(dtype),
    }
    alone = whole(wholes)
    ((_, data),) = alone.blocks
    cuts = [0, 100, 101, 700, data.numel()]
    parts = [
        FilePart(alone.entries, [(start, data[start:stop].clone())], leads=start == 700)
        for start, stop in zip(cuts, cuts[1:], strict=False)
    ]
    with ThreadPoolExecutor(4) as pool:
        ranges = [own for found in pool.map(lambda part: tensor_file.write(file, part), parts) for own in found]
    found, stored = load_file(file), tensor_file.read(file)
    assert found.keys() == wholes.keys() == stored.keys()
    for name, tensor in wholes.items():
        assert torch.equal(found[name], tensor) and torch.equal(stored[name].values.view(tensor.shape), tensor)
    content = file.read_bytes()
    assert all(own.crc == zlib.crc32(content[own.start : own.stop]) for own in ranges)
    assert merge(ranges, 1 << 30) == [Range(0, len(content), zlib.crc32(content))]


def test_nothing_of_the_file_is_read_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    opened = os.open
    monkeypatch.setattr(os, "open", lambda *words: flags.append(words[1]) or opened(*words))
    tensor_file.write(tmp_path / "file", whole({"w": torch.ones(1000)}))
    (flag,) = flags
    assert flag & os.O_ACCMODE == os.O_WRONLY


def test_what_is_written_does_not_pile_up_in_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_CACHED_BYTES", 1000)
    events: list[object] = []
    pwrite, fdatasync, fadvise = os.pwrite, os.fdatasync, os.posix_fadvise
    monkeypatch.setattr(os, "pwrite", lambda *words: events.append(pwrite(*words)) or events[-1])
    monkeypatch.setattr(os, "fdatasync", lambda *words: events.append("synced") or fdatasync(*words))
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: events.append("dropped") or fadvise(*words))
    flat = torch.arange(3000.0)
    data = flat.view(torch.uint8)
    sizes = [400, 400, 400, 5000, 400, 5400]
    blocks = [(start, data[start : start + size]) for start, size in zip(accumulate([0, *sizes]), sizes, strict=False)]
    file = tmp_path / "model.safetensors"
    tensor_file.write(file, FilePart(whole({"w": flat}).entries, blocks))
    assert torch.equal(load_file(file)["w"], flat)
    cached = most = 0
    for event in events:
        cached = 0 if event == "dropped" else cached + (event if isinstance(event, int) else 0)
        most = max(most, cached)
    assert most < 2000 and events[-1] == "dropped"
    assert all(events[number - 1] == "synced" for number, event in enumerate(events[:-1]) if event == "dropped")


def test_checksums_of_neighbours_combine() -> None:
    data = os.urandom(100_000)
    for cut in (0, 1, 7, 4096, 99_999, 100_000):
        parts = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        assert combine(*parts, len(data) - cut) == zlib.crc32(data)
    zeros = 5 * 2**30  # more than 32 bits hold
    assert combine(zlib.crc32(b"ab"), 0, 0) == zlib.crc32(b"ab")
    one = combine(combine(7, 9, zeros), 11, zeros)
    assert one == combine(7, combine(9, 11, zeros), 2 * zeros)


def test_ranges_are_joined_until_they_are_long_enough() -> None:
    data = os.urandom(1000)
    ranges = [Range(start, start + 100, zlib.crc32(data[start : start + 100])) for start in range(0, 1000, 100)]
    joined = merge(reversed(ranges), 250)
    assert [(own.start, own.stop) for own in joined] == [(0, 300), (300, 600), (600, 900), (900, 1000)]
    assert all(own.crc == zlib.crc32(data[own.start : own.stop]) for own in joined)
    assert merge([ranges[0], ranges[2]], 250) == [ranges[0], ranges[2]]  # no neighbours


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"something else")
    with pytest.raises(DamagedCheckpoint, match=f"{tmp_path / 'file'}: not a valid safetensors file"):
        tensor_file.read(tmp_path / "file")

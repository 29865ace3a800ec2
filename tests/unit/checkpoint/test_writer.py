"""Training does not wait for a checkpoint's files, and goes on when they cannot be written."""

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fragments import whole
from thread_world import make_worlds, on_ranks

from hvd_transformer.checkpoint import tensor_file, writer
from hvd_transformer.checkpoint.crc import Range
from hvd_transformer.checkpoint.store import MODEL, CheckpointStore, Snapshot
from hvd_transformer.checkpoint.tensor_file import Entry, FilePart
from hvd_transformer.checkpoint.writer import Saver
from hvd_transformer.comm import rounds
from hvd_transformer.comm.world import World

real_write, real_enter = tensor_file.write, writer.staging.enter


def snapshot(step: int, count: int = 10) -> Snapshot:
    return Snapshot(step, {MODEL: whole({"w": torch.full([count], float(step))})}, {"step": step})


def fail(message: str) -> None:
    pytest.fail(message)


def make_saver(store: CheckpointStore, warn: Callable[[str], None]) -> Saver:
    return Saver(store, World(), warn)


def save(saver: Saver, taken: Snapshot) -> None:
    begun = saver.begin(taken.step)
    if begun is not None:
        saver.save(taken, begun)


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Files cannot grow beyond so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_save_returns_before_the_files_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, 3)
    may_write, real = threading.Event(), store.save
    monkeypatch.setattr(store, "save", lambda *words: may_write.wait(10) and real(*words))
    saver = make_saver(store, fail)
    save(saver, snapshot(1))
    assert store.steps() == []
    may_write.set()
    save(saver, snapshot(2))  # waits for the one before
    assert [path.name for path in store.steps()][0] == "step-00000001"
    saver.close()
    assert [path.name for path in store.steps()] == ["step-00000001", "step-00000002"]


def test_waiting_for_nothing_returns(tmp_path: Path) -> None:
    saver = make_saver(CheckpointStore(tmp_path, 3), fail)
    saver.wait()
    saver.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    warnings: list[str] = []
    saver = make_saver(store, warnings.append)
    save(saver, snapshot(1))
    saver.wait()
    before = sorted(path.name for path in tmp_path.iterdir())
    with small_files(20_000):
        save(saver, snapshot(2, count=100_000))
        saver.wait()
    (warning,) = warnings
    assert warning.startswith(f"the checkpoint of step 2 could not be written to {tmp_path}: ")
    assert "training continues" in warning and "\n" not in warning
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    # There is room again.
    save(saver, snapshot(3, count=100_000))
    saver.close()
    assert store.newest_whole(fail) == tmp_path / "step-00000003" and len(warnings) == 1


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    warnings: list[str] = []
    saver = make_saver(CheckpointStore(tmp_path / "checkpoints", 2), warnings.append)
    save(saver, snapshot(1))
    saver.close()
    assert len(warnings) == 1 and "step 1" in warnings[0]


def test_our_own_mistakes_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    saver = make_saver(CheckpointStore(tmp_path, 2), fail)
    save(saver, Snapshot(1, {}, {"no JSON": object()}))
    with pytest.raises(TypeError):
        saver.wait()


def test_ranks_that_wait_for_a_long_write_see_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has written, rank 1 writes for a long time, and then stands still; rank 2 does not see the folder."""
    monkeypatch.setattr(rounds, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(writer, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(writer.staging, "enter", lambda folder, rank: rank < 2 and real_enter(folder, rank))
    worlds, stands_still, goes_on = make_worlds(3), threading.Event(), threading.Event()

    def write(file: Path, part: FilePart, advance: Callable[[], object]) -> list[Range]:
        if threading.current_thread().name.startswith("checkpoint"):
            deadline, before = time.monotonic() + 30, [world.link.ended for world in worlds]
            while part.blocks and part.blocks[0][0] and time.monotonic() < deadline:  # rank 1's half
                advance()
                time.sleep(0.01)
                seen = [world.link.ended - first for world, first in zip(worlds, before, strict=True)]
                if min(seen) > 5:
                    break
            if part.blocks and part.blocks[0][0]:
                stands_still.set()
                assert goes_on.wait(30)
        return real_write(file, part, advance)

    monkeypatch.setattr(tensor_file, "write", write)
    values = torch.arange(10.0)
    entries, data = [Entry("w", values.dtype, (10,))], values.view(torch.uint8)
    parts = [FilePart(entries, [(0, data[:20])]), FilePart(entries, [(20, data[20:])], leads=False)]

    def one(world: World) -> int:
        store = CheckpointStore(tmp_path / "checkpoints", 1)
        saver = Saver(store, world, fail)
        begun = saver.begin(1)
        assert begun is not None
        written = {MODEL: parts[world.rank]} if world.rank < 2 else {}
        saver.save(Snapshot(1, written, {"step": 1}, writers=begun.writers), begun)
        before = world.link.ended
        saver.close()
        return world.link.ended - before

    signs = []

    def watch() -> None:
        assert stands_still.wait(30)
        before, deadline = None, time.monotonic() + 30
        while (now := [world.link.ended for world in worlds]) != before and time.monotonic() < deadline:
            before = now
            time.sleep(0.5)  # several rounds; the first ones tell of what was before
        signs.extend(after - first for after, first in zip(now, before or [], strict=True))
        goes_on.set()

    watching = threading.Thread(target=watch)
    watching.start()
    found = on_ranks(worlds, one)
    watching.join()
    assert min(found) > 5, found
    assert signs == [0, 0, 0]
    assert CheckpointStore(tmp_path / "checkpoints", 1).newest_whole(fail) is not None


def test_the_loss_of_a_rank_ends_the_wait_for_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(writer, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(writer.staging, "_LAST_SECONDS", 0.1)
    first, other = make_worlds(2)
    warnings: list[str] = []

    def one(world: World) -> None:
        saver = Saver(CheckpointStore(tmp_path, 1), world, warnings.append)
        begun = saver.begin(1)
        assert begun is not None
        if world is other:  # which never writes
            return
        saver.save(Snapshot(1, {MODEL: whole({"w": torch.ones(3)})}, {"step": 1}, writers=begun.writers), begun)
        lost = ConnectionError("rank 1 is lost")
        monkeypatch.setattr(world, "all_reduce_", lambda *_: (_ for _ in ()).throw(lost))
        with pytest.raises(ConnectionError, match="rank 1 is lost"):
            saver.wait()
        saver.end()

    assert on_ranks([first, other], one) == [None, None]
    (warning,) = warnings
    assert "rank 1 has not written its part" in warning and not CheckpointStore(tmp_path, 1).steps()


FULL = """
import sys
from pathlib import Path
import torch
from hvd_transformer.checkpoint.tensor_file import Entry, FilePart
from hvd_transformer.checkpoint.store import MODEL, CheckpointStore, Snapshot
from hvd_transformer.checkpoint.writer import Saver
from hvd_transformer.comm.world import World

folder, warnings = Path(sys.argv[1]), []
store = CheckpointStore(folder / "checkpoints", 3)
saver = Saver(store, World(), warnings.append)
for step in range(1, 8):
    values = torch.full([30_000], float(step))
    part = FilePart([Entry("w", values.dtype, (30_000,))], [(0, values.view(torch.uint8))])
    begun = saver.begin(step)
    if begun is not None:
        saver.save(Snapshot(step, {MODEL: part}, {"step": step}), begun)
    if step == 5:
        saver.wait()
        (folder / "filler").unlink()
saver.close()
print(len(warnings), store.newest_whole(warnings.append).name, [path.name for path in store.steps()])
print(warnings[0] if warnings else "")
print(sorted(path.name for path in store.folder.iterdir() if path.name.startswith(".")))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """Room for two of three checkpoints, then for all of them."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    try:
        (disk / "filler").write_bytes(bytes(480_000))
        done = subprocess.run([sys.executable, "-c", FULL, disk], capture_output=True, text=True, timeout=60)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert done.returncode == 0, done.stderr
    kept, warning, leftovers = done.stdout.splitlines()
    assert kept == "3 step-00000007 ['step-00000002', 'step-00000006', 'step-00000007']"
    assert "could not be written" in warning and "No space left" in warning
    assert leftovers == "[]"

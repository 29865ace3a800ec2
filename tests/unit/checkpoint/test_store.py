"""A checkpoint is there whole or not at all, whatever happens while it is saved; the right ones are kept."""

import errno
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fragments import whole
from safetensors.torch import load_file

from hvd_transformer.checkpoint import manifest, staging
from hvd_transformer.checkpoint.layout import Writers
from hvd_transformer.checkpoint.manifest import DamagedCheckpoint
from hvd_transformer.checkpoint.shared_folder import with_verification
from hvd_transformer.checkpoint.staging import Writing
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, CheckpointStore, Snapshot, read_state, resolve
from hvd_transformer.checkpoint.stored_tensors import StoredTensors
from hvd_transformer.checkpoint.tensor_file import Entry, FilePart
from hvd_transformer.comm.world import World
from hvd_transformer.errors import UserError


def snapshot(step: int, best: bool = False) -> Snapshot:
    tensors = {MODEL: whole({"w": torch.full([2, 3], float(step)), "b": torch.ones(2)}), OPTIMIZER: whole({})}
    return Snapshot(step, tensors, {"step": step}, best)


def no_warning(message: str) -> None:
    pytest.fail(message)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_can_be_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new" / "checkpoints", 3)
    path = store.save(snapshot(200))
    assert path.name == "step-00000200"
    manifest.verify(path)
    assert read_state(path) == {"step": 200}
    # Any safetensors reader reads it.
    saved = load_file(path / MODEL)
    assert torch.equal(saved["w"], torch.full([2, 3], 200.0)) and torch.equal(saved["b"], torch.ones(2))
    stored = StoredTensors(path, MODEL)
    stored.check({"w": [2, 3], "b": [2]})
    assert all(torch.equal(stored.whole(name), tensor) for name, tensor in saved.items())
    StoredTensors(path, OPTIMIZER).check({})
    assert names(tmp_path / "new" / "checkpoints") == ["latest", "step-00000200"]
    assert (path.parent / "latest").resolve() == path


def test_views_into_one_block_of_memory_are_saved_apart(tmp_path: Path) -> None:
    flat = torch.arange(100.0)
    views = {"a": flat[:10].view(2, 5), "b": flat[16:20]}
    path = CheckpointStore(tmp_path, 1).save(Snapshot(1, {MODEL: whole(views)}, {}))
    saved = load_file(path / MODEL)
    assert torch.equal(saved["a"], flat[:10].view(2, 5)) and torch.equal(saved["b"], flat[16:20])
    assert (path / MODEL).stat().st_size < 300


def test_files_can_be_read_by_all_who_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = CheckpointStore(tmp_path, 1).save(snapshot(1))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o644}


def test_steps_are_in_the_order_of_their_numbers_and_nothing_else_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 9)
    for step in (200_000_000, 5, 99_999_999):
        store.save(snapshot(step))
    (tmp_path / "step-00000007.damaged").mkdir()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes").mkdir()
    assert [path.name for path in store.steps()] == ["step-00000005", "step-99999999", "step-200000000"]
    assert CheckpointStore(tmp_path / "none", 1).steps() == []


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_newest_and_the_best_are_kept(keep_last: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last)
    best_steps = {20, 40}
    for step in range(10, 100, 10):
        store.save(snapshot(step, best=step in best_steps))
        best = max((number for number in best_steps if number <= step), default=None)
        kept = set(range(10, step + 1, 10)[-keep_last:]) | ({best} if best else set())
        assert [path.name for path in store.steps()] == [f"step-{number:08d}" for number in sorted(kept)]
        assert (tmp_path / "latest").resolve().name == f"step-{step:08d}"
        link = tmp_path / "best"
        assert link.is_symlink() == bool(best) and (not best or link.resolve().name == f"step-{best:08d}")
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_the_same_step_once_more_takes_the_place_of_the_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    store.save(snapshot(5))
    store.save(Snapshot(5, {MODEL: whole({"w": torch.zeros(1)})}, {"second": True}))
    assert read_state(store.newest_whole(no_warning)) == {"second": True}
    assert names(tmp_path) == ["latest", "step-00000005"]


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3)
    assert store.newest_whole(no_warning) is None
    for step in (1, 2):
        store.save(snapshot(step))
    assert store.newest_whole(no_warning) == tmp_path / "step-00000002"


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "state.json", manifest.NAME])
@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "extra"])
def test_damaged_ones_are_reported_and_kept_and_the_one_before_is_used(how: str, name: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 9)
    for step in (1, 2, 3):
        store.save(snapshot(step))
    for step in (2, 3):
        file = tmp_path / f"step-{step:08d}" / name
        content = file.read_bytes()
        if how == "truncated":
            file.write_bytes(content[: len(content) // 2])
        elif how == "flipped":
            file.write_bytes(content[:5] + bytes([content[5] ^ 4]) + content[6:])
        elif how == "missing":
            file.unlink()
        else:
            (file.parent / "model.pt").write_bytes(content)
    before = {step: names(tmp_path / f"step-{step:08d}") for step in (2, 3)}
    warnings: list[str] = []
    assert store.newest_whole(warnings.append) == tmp_path / "step-00000001"
    assert len(warnings) == 2
    for step, warning in zip((3, 2), warnings, strict=True):
        assert f"step-{step:08d}" in warning and "the checkpoint before it is used" in warning
        assert ("model.pt" if how == "extra" else name) in warning
        # Set aside, with all that was in it.
        assert names(tmp_path / f"step-{step:08d}.damaged") == before[step]
    # The next start has nothing to report, and the next save of that step its own place.
    assert store.newest_whole(no_warning) == tmp_path / "step-00000001"
    store.save(snapshot(2))
    assert store.newest_whole(no_warning) == tmp_path / "step-00000002"


def test_a_step_damaged_twice_is_set_aside_twice(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 9)
    store.save(snapshot(1))
    for _ in range(2):
        (store.save(snapshot(2)) / MODEL).unlink()
        assert store.newest_whole(lambda message: None) == tmp_path / "step-00000001"
    assert [name for name in names(tmp_path) if "damaged" in name] == [
        "step-00000002.damaged",
        "step-00000002.damaged-1",
    ]


def test_where_none_is_whole_it_says_so_and_does_not_begin_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 9)
    for step in (1, 2):
        (store.save(snapshot(step)) / MODEL).write_bytes(b"")
    before = names(tmp_path)
    for _ in range(2):  # the second start neither
        with pytest.raises(DamagedCheckpoint) as caught:
            store.newest_whole(no_warning)
        assert "no whole checkpoint is in" in str(caught.value) and MODEL in str(caught.value)
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("number", "name"),
    [(errno.EACCES, MODEL), (errno.EMFILE, MODEL), (errno.EIO, None), (errno.EACCES, manifest.NAME)],
)
def test_one_that_may_not_be_read_is_not_damaged(
    number: int, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A colleague's umask, or too many open files: nothing is set aside, as for a disk that fails."""
    store = CheckpointStore(tmp_path, 9)
    for step in (1, 2):
        store.save(snapshot(step))
    real, newest = io.open, tmp_path / "step-00000002"

    def refuses(file: Any, *more: Any, **named: Any) -> Any:
        if file == newest / (name or MODEL):
            raise OSError(number, os.strerror(number), str(file))
        return real(file, *more, **named)

    monkeypatch.setattr(io, "open", refuses)  # with which pathlib opens
    warnings: list[str] = []

    def find(verify: manifest.Verify) -> Path | None:
        return store.newest_whole(warnings.append, verify)

    if name is None:
        assert with_verification(World(), find) == tmp_path / "step-00000001"
        assert "Input/output error; it is set aside" in warnings[0]
        return
    with pytest.raises(UserError) as caught:
        with_verification(World(), find)
    assert str(caught.value) == f"{newest / name}: cannot be read: {os.strerror(number)}"
    assert not isinstance(caught.value, DamagedCheckpoint) and warnings == []
    assert store.steps() == [tmp_path / "step-00000001", newest]


def test_a_step_that_is_damaged_or_not_there_is_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 9)
    assert store.whole(1) is None
    store.save(snapshot(1, best=True))
    store.save(snapshot(2))
    assert store.whole(1) == tmp_path / "step-00000001"
    (tmp_path / "step-00000001" / MODEL).unlink()
    assert store.whole(1) is None
    assert store.whole(3) is None


def test_a_checkpoint_argument_is_a_checkpoint_or_a_runs_best_or_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 9)
    with pytest.raises(UserError, match="no such checkpoint folder"):
        resolve(tmp_path / "nowhere")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path}: the run directory has no checkpoint"):
        resolve(tmp_path)
    first, second = store.save(snapshot(1)), store.save(snapshot(2))
    assert resolve(tmp_path) == second and resolve(first) == first
    assert resolve(tmp_path / "checkpoints" / "latest") == second
    third = store.save(snapshot(3, best=True))
    store.save(snapshot(4))
    assert resolve(tmp_path) == third
    (third / "state.json").write_text("{}")
    with pytest.raises(DamagedCheckpoint, match="state.json: truncated"):
        resolve(tmp_path)


def test_tensors_of_another_model_are_named(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, 1).save(snapshot(1)) / MODEL
    cases = {
        "c is in the model but not in the file": {"w": [2, 3], "b": [2], "c": [1]},
        "b is in the file but not in the model": {"w": [2, 3]},
        "w is \\[2, 3\\], not \\[3, 2\\]": {"w": [3, 2], "b": [2]},
    }
    for message, shapes in cases.items():
        with pytest.raises(UserError, match=f"{path}: of another model: {message}"):
            StoredTensors(path.parent, MODEL).check(shapes)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_state_that_is_no_json_object_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedCheckpoint, match=f"{tmp_path / 'state.json'}: "):
        read_state(tmp_path)


def test_clean_removes_what_a_killed_save_left_and_nothing_else(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 9)
    whole = store.save(snapshot(1, best=True))
    before = names(tmp_path)
    shutil.copytree(whole, tmp_path / ".saving-step-00000002-77")
    shutil.copytree(whole, tmp_path / ".removing-step-00000000-77")
    (tmp_path / ".latest-77").symlink_to("step-00000001")
    (tmp_path / ".best-77").symlink_to(".removing-step-00000000-77")
    store.clean()
    assert names(tmp_path) == before
    manifest.verify(whole)
    CheckpointStore(tmp_path / "none", 1).clean()


def telling(step: int, best_step: int) -> Snapshot:
    state = {"step": step, "position": {"best_step": best_step}}
    return replace(snapshot(step, best=step == best_step), state=state)


def test_the_best_is_named_again_after_a_kill_before_its_link_was_made(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    store.save(telling(1, best_step=1))
    store.save(replace(telling(2, best_step=2), best=False))
    store.clean()
    assert (tmp_path / "best").resolve() == tmp_path / "step-00000002"


def test_no_best_is_named_where_none_is_kept(tmp_path: Path) -> None:
    """Nothing would move the link to a later one: commands would use an old checkpoint for ever."""
    store = CheckpointStore(tmp_path, 9)
    for step in (1, 2):
        store.save(replace(telling(step, best_step=1), best=False))
    store.clean(keep_best=False)
    assert not (tmp_path / "best").exists()
    store.clean()
    assert (tmp_path / "best").resolve() == tmp_path / "step-00000001"
    store.clean(keep_best=False)
    assert not (tmp_path / "best").is_symlink() and len(store.steps()) == 2


def test_the_best_before_a_damaged_one_is_named_again_and_kept(tmp_path: Path) -> None:
    store, warnings = CheckpointStore(tmp_path, 9), []
    for step, best in ((1, 1), (2, 1), (3, 3)):
        store.save(telling(step, best))
    (tmp_path / "step-00000003" / MODEL).unlink()
    assert store.newest_whole(warnings.append) == tmp_path / "step-00000002" and len(warnings) == 1
    store.clean()
    store.keep_last = 1
    store.save(telling(4, best_step=1))
    assert (tmp_path / "best").resolve() == tmp_path / "step-00000001"
    assert [path.name for path in store.steps()] == ["step-00000001", "step-00000004"]


def test_a_save_that_fails_leaves_the_others_and_no_leftovers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    store.save(snapshot(1))
    before = names(tmp_path)
    broken = Snapshot(2, {MODEL: whole({"w": torch.zeros(2)})}, {"no JSON": object()})
    with pytest.raises(TypeError):
        store.save(broken)
    assert names(tmp_path) == before
    assert store.newest_whole(no_warning) == tmp_path / "step-00000001"


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the rename must not find files without their contents."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    CheckpointStore(tmp_path, 1).save(snapshot(1))
    named = events.index("rename to step-00000001")
    assert {MODEL, OPTIMIZER, "state.json", manifest.NAME} <= set(events[:named])
    assert any(name.startswith(".saving-step-00000001-") for name in events[:named])
    assert tmp_path.name in events[named:]


RANKS = Writers((0, 0, 1, 1, None))  # the last one does not see the folder


def parts(step: int) -> list[Snapshot]:
    """Four ranks' parts of two tensors, on two hosts."""
    flat = torch.arange(10.0).view(torch.uint8)
    places = ((0, 12), (12, 40))

    def part(rank: int) -> Snapshot:
        start, stop = places[rank % 2]
        name = "ab"[rank // 2]
        file = FilePart([Entry(name, torch.float32, (2, 5))], [(start, flat[start:stop])], leads=rank % 2 == 0)
        return Snapshot(step, {RANKS.file(MODEL, rank // 2): file}, {"step": step}, writers=RANKS)

    return [part(rank) for rank in range(4)]


def begun(store: CheckpointStore, step: int) -> Path:
    folder = store.begin(step)
    assert all(staging.enter(folder, rank) for rank in (1, 2, 3))
    return folder


def test_a_checkpoint_has_its_name_when_all_ranks_have_written(tmp_path: Path) -> None:
    store, (own, *others) = CheckpointStore(tmp_path, 2), parts(4)
    folder = begun(store, 4)
    with ThreadPoolExecutor(4) as pool:
        saving = pool.submit(store.save, own, folder)
        for rank in (3, 1, 2):  # the second host's first rank waits for its other one
            time.sleep(0.1)
            assert store.steps() == [] and not saving.done()
            pool.submit(CheckpointStore(tmp_path, 2).save_part, others[rank - 1], folder, rank, Writing())
        path = saving.result(10)
    names_of = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert names(path) == [manifest.NAME, *names_of.values(), "state.json"]
    for name, file in names_of.items():
        assert torch.equal(load_file(path / file)[name], torch.arange(10.0).view(2, 5))
    manifest.verify(path)


@pytest.mark.parametrize("culprit", [1, 2, 3])
def test_a_part_that_could_not_be_written_is_told_and_leaves_nothing(culprit: int, tmp_path: Path) -> None:
    store, (own, *others) = CheckpointStore(tmp_path, 2), parts(4)
    store.save(snapshot(1))
    before = names(tmp_path)
    folder = begun(store, 4)
    staging.fail(folder, culprit)
    for rank in {3, 2, 1} - {culprit}:
        if (rank, culprit) == (2, 3):
            with pytest.raises(OSError, match="rank 3 could not write its part"):
                store.save_part(others[rank - 1], folder, rank, Writing())
        elif rank != 2 or culprit == 3:
            store.save_part(others[rank - 1], folder, rank, Writing())
    if culprit == 1:
        store.save_part(others[1], folder, 2, Writing())
    with pytest.raises(OSError, match=f"rank {culprit} could not write its part; its log says why"):
        store.save(own, folder)
    assert names(tmp_path) == before


def test_a_full_disk_on_another_rank_is_noted_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, (_, other, *_) = CheckpointStore(tmp_path, 2), parts(4)
    folder = begun(store, 4)

    def full(descriptor: int, data: bytes, place: int) -> int:
        raise OSError("no room")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no room"):
        store.save_part(other, folder, 1, Writing())
    assert {"failed-1", "writing-0"} <= set(names(folder)) and "writing-1" not in names(folder)


def test_a_rank_that_has_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_transformer.checkpoint.staging._LAST_SECONDS", 0.2)
    store, writing, (own, *_) = CheckpointStore(tmp_path, 2), Writing(), parts(4)
    store.save(snapshot(1))
    before = names(tmp_path)
    folder = begun(store, 4)
    writing.ending.set()
    with pytest.raises(OSError, match="rank 1 has not written its part"):
        store.save(own, folder, writing)
    assert names(tmp_path) == before


# Children of one process that has torch already: a kill at every call that changes the folder, then at random.
KILLS = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from hvd_transformer.checkpoint import manifest, tensor_file
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, CheckpointStore, Snapshot, read_state
from hvd_transformer.checkpoint.tensor_file import Entry, FilePart

torch.set_num_threads(1)
root, size, keep_last, again = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "again"

def save(store, step):
    weights = torch.full([size], float(step)).view(torch.uint8)
    model = FilePart([Entry("w", torch.float32, (size,))], [(0, weights)])
    store.save(Snapshot(step, {MODEL: model, OPTIMIZER: FilePart([], [])}, {"step": step}))

def child(store, steps, kill_at):
    process = os.fork()
    if process:
        return process
    try:
        calls = 0
        def hook(event, args):
            nonlocal calls
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.chmod"):
                if str(root) in str(args[0]) or event in ("os.remove", "os.rmdir", "os.symlink"):
                    if calls == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    calls += 1
        sys.addaudithook(hook)
        for step in steps:
            save(store, step)
        os._exit(0)
    except BaseException as error:
        print("child failed:", error, flush=True)
    os._exit(9)

def after(store, allowed):
    problems = []
    found = None
    try:
        found = store.newest_whole(problems.append)
    except Exception as error:
        problems.append(str(error))
    step = read_state(found)["step"] if found else None
    if step not in allowed:
        problems.append(f"the newest is {step}, not one of {allowed}")
    store.clean()
    if any(path.name.startswith(".") for path in store.folder.iterdir()):
        problems.append("leftovers")
    if not problems:
        save(store, step + 1)
        problems += [] if store.newest_whole(problems.append).name == f"step-{step + 1:08d}" else ["no new one"]
    return problems

killed, problems = 0, []
for moment in range(200):
    folder = root / f"{moment}"
    store = CheckpointStore(folder, keep_last)
    save(store, 1)
    save(store, 2)
    process = child(store, [2 if again else 3], moment)
    status = os.waitpid(process, 0)[1]
    for problem in after(store, [2] if again else [2, 3]):
        problems.append(f"call {moment}: {problem}")
    shutil.rmtree(folder)
    if os.WIFEXITED(status):
        if os.WEXITSTATUS(status):
            problems.append(f"exit {os.WEXITSTATUS(status)}")
        break
    killed += 1

chooser, saved = random.Random(1), 0
for attempt in range(0 if again else 10):
    folder = root / f"random{attempt}"
    store = CheckpointStore(folder, keep_last)
    save(store, 1)
    process = child(store, range(2, 10**6), -1)
    time.sleep(chooser.uniform(0.01, 0.08))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    saved += len(store.steps())
    for problem in after(store, range(1, 10**6)):
        problems.append(f"random {attempt}: {problem}")
print(json.dumps({"killed": killed, "saved": saved, "problems": problems}))
"""


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where it can be: hundreds of saves, and what a kill leaves does not depend on the disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def kills(folder: Path, *words: object) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, folder, *map(str, words)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kill_at_any_moment_of_a_save_leaves_only_whole_checkpoints(quick_folder: Path) -> None:
    result = kills(quick_folder, 200_000, 2, "new")
    assert result["problems"] == []
    # Kills hit writes, renames, links and removals.
    assert result["killed"] > 15 and result["saved"] > 10


def test_a_kill_while_the_same_step_is_saved_again_leaves_one_of_the_two(quick_folder: Path) -> None:
    assert kills(quick_folder, 1000, 1, "again")["problems"] == []

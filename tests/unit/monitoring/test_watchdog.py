"""The watchdog: limits, heartbeat file, stacks on demand, and the end of a process that makes no progress."""

import errno
import faulthandler
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from hvd_transformer.errors import STALLED
from hvd_transformer.monitoring.watchdog import FOLDER, LOOK_SECONDS, Watchdog


@pytest.mark.parametrize(
    ("stall_seconds", "period", "lasted", "limit"),
    [
        (None, "start", [], 600),
        (None, "step", [1.0, 2.0], 30),
        (None, "step", [8.0, 20.0, 9.0], 200),
        (None, "step", [20.0] + [1.0] * 100, 30),  # the last hundred
        (None, "checkpoint", [], 600),
        (None, "checkpoint", [1.0], 450),
        (None, "evaluation", [40.0], 450),
        (None, "evaluation", [50.0], 500),
        (5.0, "step", [], 5),
        (5.0, "step", [100.0], 5),
        (5.0, "evaluation", [1.0], 10),
        (5.0, "evaluation", [], 600),
        (5.0, "start", [], 600),
        (3600.0, "start", [], 3600),
        (3600.0, "checkpoint", [1.0], 3600),
    ],
)
def test_limits(stall_seconds: float | None, period: str, lasted: list[float], limit: float) -> None:
    watchdog = Watchdog(0, 2, stall_seconds)
    watchdog.heartbeat.period = period
    watchdog.heartbeat.lasted.get(period, []).extend(lasted)
    assert watchdog.limit() == limit


@pytest.mark.parametrize(("phase", "limit"), [("data", 450), ("log", 450), ("forward", 30)])
def test_a_step_that_reads_or_writes_files_may_wait_for_them(phase: str, limit: float) -> None:
    watchdog = Watchdog(0, 2)
    watchdog.heartbeat.period, watchdog.heartbeat.phase = "step", phase
    watchdog.heartbeat.lasted["step"].append(1.0)
    assert watchdog.limit() == limit
    watchdog.stall_seconds = 5.0
    assert watchdog.limit() == 5


def read(file: Path, until: float) -> dict:
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    return json.loads(file.read_text())


def test_the_file_says_how_the_rank_is_and_goes_in_the_end(monkeypatch, tmp_path, capfd) -> None:
    private, logs = tmp_path / "private", tmp_path / "logs"
    private.mkdir()
    logs.mkdir()
    monkeypatch.setenv(FOLDER, str(private))
    watchdog = Watchdog(3, 4)
    watchdog.heartbeat.total_steps, watchdog.heartbeat.unit = 9, "samples"
    watchdog.heartbeat.stepped(7, 2.5, 1000.0)
    watchdog.heartbeat.work_seconds, watchdog.heartbeat.mfu = 0.25, 0.375
    watchdog.start()
    try:
        watchdog.use(logs, ["h1", "h1", "h2", "h2"])
        beat = read(private / "beat-3", time.monotonic() + 20)
        # faulthandler writes the newest 100 threads; other tests of this process may have left as many.
        stack = (
            "in test_the_file_says_how_the_rank_is" if threading.active_count() < 100 else "(most recent call first)"
        )
        os.kill(os.getpid(), signal.SIGUSR1)
        until = time.monotonic() + 20
        while stack not in (logs / "rank-003.log").read_text():
            assert time.monotonic() < until  # any thread may write the stacks
            time.sleep(0.02)
    finally:
        watchdog.close()
    assert abs(beat.pop("time") - time.monotonic()) < 30
    assert beat.pop("phase_seconds") < 30 and beat.pop("progress_seconds") < 30
    assert 2**20 < beat.pop("memory") < 2**40
    assert beat == {
        "rank": 3, "host": os.uname().nodename, "pid": os.getpid(), "step": 7, "ahead": 0, "total_steps": 9,
        "phase": "log", "waits_for": None, "limit_seconds": 600, "loss": 2.5, "tokens_per_second": 1000.0,
        "unit": "samples", "mfu": 0.375, "work_seconds": 0.25, "late": False,
    }  # fmt: skip
    assert list(private.iterdir()) == [] and [path.name for path in logs.iterdir()] == ["rank-003.log"]


def test_a_full_disk_leaves_room_for_the_newest_heartbeat(monkeypatch, tmp_path) -> None:
    """The launcher would take a rank without heartbeats for one that does not run."""

    def no_space(path: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv(FOLDER, str(tmp_path))
    watchdog = Watchdog(0, 1)
    for step in (7, 1234567, 8):
        watchdog.heartbeat.step, watchdog._beaten = step, -math.inf
        watchdog._look()
        monkeypatch.setattr(Path, "replace", no_space)  # from now on
        assert json.loads((tmp_path / "beat-0").read_text())["step"] == step
    watchdog.close()
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("size", [2, 64, 1024])
def test_many_ranks_write_seldom_to_one_folder_and_silence_is_still_seen(size, monkeypatch, tmp_path) -> None:
    """A minute with progress every 10 s only: the writes per second of all ranks, and no look for others' stalls."""
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    now, written, looked_for = 0.0, [], []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watchdog = Watchdog(0, size)
    watchdog.use(tmp_path, [f"h{rank // 8}" for rank in range(size)])
    watchdog.heartbeat.lasted["step"].append(2.0)
    watchdog.heartbeat.period = "step"
    monkeypatch.setattr(watchdog, "_write", lambda *_: written.append(now))
    monkeypatch.setattr(Path, "exists", lambda path: bool(looked_for.append(path)))
    monkeypatch.setattr(watchdog._storage, "start", lambda action: action())
    while now < 60:
        now += LOOK_SECONDS
        if now % 10 == 0:
            watchdog.heartbeat.tick()
        watchdog._look()
    watchdog.close()
    longest = max(later - earlier for earlier, later in pairwise([0.0, *written]))
    assert size * len(written) / 60 <= 128
    assert 3 * longest + 1.5 <= 30
    assert not looked_for


def test_a_rank_without_progress_ends_with_the_others(monkeypatch, tmp_path) -> None:
    """Long before its own limit: it is in its first step, which may take ten minutes."""
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    now, ended = 0.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watchdog = Watchdog(0, 2)
    watchdog.use(tmp_path, ["h1", "h2"])
    monkeypatch.setattr(watchdog, "_stall", lambda: ended.append(now))
    monkeypatch.setattr(watchdog._storage, "start", lambda action: action())  # else it is a thread's, at any time
    (tmp_path / "beat-late").touch()
    while not ended and now < 60:
        now += LOOK_SECONDS
        watchdog._look()
    watchdog.close()
    assert ended and ended[0] <= 20


def test_while_the_storage_stands_still_nobody_is_late(monkeypatch, tmp_path) -> None:
    """The rank waits for another one, whose log cannot be written: for a minute, then for ever."""
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr("hvd_transformer.monitoring.watchdog._ANSWER_SECONDS", 0.01)
    now, ended, moves = 0.0, [], threading.Event()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watchdog = Watchdog(0, 2, stall_seconds=5)
    watchdog.use(tmp_path, ["h1", "h2"])
    watchdog.heartbeat.period = "step"
    monkeypatch.setattr(watchdog, "_stall", lambda: ended.append(now))
    monkeypatch.setattr(Path, "touch", lambda path: moves.wait() and path.write_bytes(b""))

    def look(seconds: float) -> None:
        nonlocal now
        until = now + seconds
        while now < until and not ended:
            now += LOOK_SECONDS
            watchdog._look()

    look(60)
    assert not ended
    moves.set()
    monkeypatch.setattr("hvd_transformer.monitoring.watchdog._ANSWER_SECONDS", 5.0)
    look(4)  # the others need a moment, too
    assert not ended
    look(4)
    assert ended  # it was not the storage

    ended.clear()
    moves.clear()
    monkeypatch.setattr("hvd_transformer.monitoring.watchdog._ANSWER_SECONDS", 0.01)
    watchdog.heartbeat.tick()
    look(440)
    assert not ended
    look(20)
    assert ended
    moves.set()
    watchdog.close()


STANDS_STILL = """
import logging, os, sys, threading, time
from pathlib import Path
from hvd_transformer.monitoring import watchdog as module
from hvd_transformer.monitoring.watchdog import Watchdog
module._STORAGE_SECONDS = float(sys.argv[3])
log, moves, touch = Path(sys.argv[1], "rank-000.log"), threading.Event(), Path.touch
os.mkfifo(log)
reading = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
watchdog = Watchdog(0, 1, stall_seconds=0.5)
watchdog.start()
watchdog.use(log.parent, ["h1"])
writing = os.open(log, os.O_WRONLY | os.O_NONBLOCK)
try:
    while os.write(writing, bytes(4096)):
        pass
except BlockingIOError:  # whoever writes now must wait
    pass
Path.touch = lambda path: (path.parent != log.parent or moves.wait()) and touch(path)
logging.basicConfig(filename=log)
watchdog.heartbeat.stepped(1, 0.0, 0.0)
time.sleep(float(sys.argv[2]))
moves.set()
os.read(reading, 1 << 20)
for _ in range(20):
    watchdog.heartbeat.tick()
    time.sleep(0.1)
watchdog.close()
"""


def test_while_its_log_cannot_be_written_a_rank_lives(tmp_path) -> None:
    """Its stacks, which would go there, must not stop it."""
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    words = [sys.executable, "-c", STANDS_STILL, tmp_path, "5", "450"]
    assert subprocess.run(words, env=environment, timeout=60).returncode == 0


@pytest.mark.parametrize("private", [True, False])
def test_where_the_storage_does_not_come_back_a_rank_ends_and_says_so(tmp_path: Path, private: bool) -> None:
    """Within the time for it, counted with what each look at the storage takes; its log cannot be written."""
    (tmp_path / "private").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    environment |= {FOLDER: str(tmp_path / "private")} if private else {}
    began = time.monotonic()
    words = [sys.executable, "-c", STANDS_STILL, tmp_path, "1000", "8"]
    done = subprocess.run(words, env=environment, timeout=90, capture_output=True, text=True)
    assert (done.returncode, time.monotonic() - began < 40) == (STALLED, True)
    assert re.search("no step for [0-9]+ s: rank 0 on host .* is late: in log after step 1 for", done.stderr)
    assert "watchdog.py" in done.stderr  # the stacks
    assert (tmp_path / "private" / "beat-late").exists() == private


ALONE = """
import ctypes, logging, sys, time
from pathlib import Path
from hvd_transformer.monitoring.watchdog import Watchdog
log = Path(sys.argv[1], "rank-000.log")
logging.basicConfig(**({"stream": sys.stderr} if log.is_dir() else {"filename": log}))
watchdog = Watchdog(0, 1, stall_seconds=0.5)
watchdog.start()
watchdog.use(Path(sys.argv[1]), ["h1"])
watchdog.heartbeat.stepped(1, 0.0, 0.0)
while not Path(sys.argv[1], "beat-0").exists():
    time.sleep(0.01)
watchdog.heartbeat.tick()
def sleep_for_ever():
    eval(sys.argv[2])(1000)
sleep_for_ever()
"""


def stalled(folder: Path) -> str:
    """What a process without progress prints when it ends itself."""
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, folder, "time.sleep"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == STALLED
    return done.stderr


def test_a_process_that_does_not_move_ends_itself(tmp_path) -> None:
    (line,) = stalled(tmp_path).splitlines()
    late = rf"no step for \d s: rank 0 on host {os.uname().nodename} is late: in log after step 1 for \d s"
    assert re.fullmatch(rf"hvd-transformer: {late}; stacks are in {tmp_path}/", line)
    assert "in sleep_for_ever" in (tmp_path / "rank-000.log").read_text()
    assert json.loads((tmp_path / "beat-0").read_text())["late"]


def test_it_ends_also_where_nothing_can_be_written(tmp_path) -> None:
    """Neither its heartbeat nor its log can be written: the stacks go to the screen."""
    for name in ("beat-0", "beat-0.tmp", "rank-000.log"):
        (tmp_path / name).mkdir()
    said = stalled(tmp_path)
    assert "in sleep_for_ever" in said and "rank 0 on host" in said


def test_stacks_are_written_where_no_other_thread_can_run(tmp_path) -> None:
    """A library function that holds the interpreter lock."""
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    holding = subprocess.Popen([sys.executable, "-c", ALONE, tmp_path, "ctypes.PyDLL(None).sleep"], env=environment)
    try:
        deadline = time.monotonic() + 60
        log = tmp_path / "rank-000.log"
        while not log.exists() or "in sleep_for_ever" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        holding.kill()
        holding.wait()

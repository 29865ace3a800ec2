"""The service is killed again and again while jobs start, run and end: none is lost, none is started twice."""

import os
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from hvd_transformer.service.jobs import ENDED, Host, Needs, State
from hvd_transformer.service.storage.store import NewJob, Store

SLOTS, QUEUED, KILLS = 10, 50, 20 if "EVERY_CASE" in os.environ else 6
LOOP = Path(__file__).parent / "service_loop.py"

# In place of hvd-transformer: a launcher that notes when it runs, and ends after a while.
LAUNCHER = """#!/bin/sh
spool="${HVD_TRANSFORMER_EXIT_FILE%/*}"
number="${spool##*/}"
echo "start $number" >>LOG
printf ! >"/proc/self/fd/$HVD_TRANSFORMER_BEGUN"
sleep 1.$((number % 9))
echo "end $number" >>LOG
printf '{"code": 0, "cause": "", "step": 1, "refused": {}, "lost": []}' >"$HVD_TRANSFORMER_EXIT_FILE.new"
mv "$HVD_TRANSFORMER_EXIT_FILE.new" "$HVD_TRANSFORMER_EXIT_FILE"
"""


def start(state: Path, launcher: Path) -> tuple["subprocess.Popen[str]", float]:
    """A service, and the seconds until it had adopted what ran."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, LOOP, state, launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "adopted\n"
    return process, time.monotonic() - began


def states(folder: Path) -> dict[int, State]:
    """The states of all jobs."""
    with closing(Store(folder / "service.db", read_only=True)) as store:
        return {job.id: job.state for job in store.jobs()}


def test_kills_with_ten_jobs_running_and_fifty_queued(tmp_path: Path) -> None:
    log, launcher, rng = tmp_path / "log", tmp_path / "launcher", random.Random(20)
    log.touch()
    launcher.write_text(LAUNCHER.replace("LOG", str(log)))
    launcher.chmod(0o755)
    needs = Needs(1, 1)
    with closing(Store(tmp_path / "service.db")) as store:
        store.put_hosts([Host("h1", SLOTS)])
        new = [
            NewJob(f"j{number}", "ann", time.time(), needs, str(tmp_path / "runs" / str(number)), str(tmp_path), ())
            for number in range(SLOTS + QUEUED)
        ]
        ids = store.add_jobs(new)
    slowest = 0.0
    for _ in range(KILLS):
        process, seconds = start(tmp_path, launcher)
        slowest = max(slowest, seconds)
        time.sleep(rng.uniform(0.0, 0.6))  # where it is then is what the test is about
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()
    process, _ = start(tmp_path, launcher)
    try:
        deadline = time.monotonic() + 120
        while not process.poll() and any(state not in ENDED for state in states(tmp_path).values()):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert states(tmp_path) == dict.fromkeys(ids, State.SUCCEEDED)
    words = [line.split() for line in log.read_text().splitlines()]
    assert sorted(int(number) for what, number in words if what == "start") == sorted(ids)
    running, most = 0, 0
    for what, _ in words:
        running += 1 if what == "start" else -1
        most = max(most, running)
    assert most <= SLOTS
    print(f"adopted within {slowest:.2f} s")

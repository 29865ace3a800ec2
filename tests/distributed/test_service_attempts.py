"""Attempts of the service with the real launcher and real ranks: begun, adopted, stopped, resumed."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from conftest import rank_environment
from jobs import steps, summary, tiny, write_corpus

from hvd_transformer.service.jobs import Attempt, Job, Needs, Placement, State
from hvd_transformer.service.launching.attempts import Change, Launchers
from hvd_transformer.service.outcome import Exit

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod", reason="needs Horovod")
    for name, value in rank_environment().items():
        monkeypatch.setenv(name, value)


def job(folder: Path, corpus: Path, num_steps: int, min_ranks: int = 2) -> Job:
    run = str(folder / "run")
    words = [*tiny(corpus), f"output_dir={run}", f"training.max_steps={num_steps}", "training.epochs=100000"]
    return Job(
        1, "x", "me", State.STARTING, 0, 0.0, Needs(2, min_ranks), run, str(folder),
        [*words, "training.eval_every=100000"], launch=["--gloo"],
    )  # fmt: skip


def change(launchers: Launchers) -> Change:
    deadline = time.monotonic() + 120
    while not (found := list(launchers.poll())):
        assert time.monotonic() < deadline
        launchers.wait(10)
    assert len(found) == 1
    return found[0]


def wait_for_line(file: Path, part: str) -> None:
    deadline = time.monotonic() + 120
    while not file.exists() or part not in file.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_attempt_is_started_forgotten_adopted_stopped_and_resumed(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus" / "text", train=20_000)
    endless, first = job(tmp_path, corpus, 100_000), Attempt(1, 1, (Placement("localhost", 2),), 0.0)
    before = Launchers(tmp_path / "state")
    before.start(endless, first, {"OMP_NUM_THREADS": "1"})
    assert change(before) == Change(1, 1)
    before.close()
    assert b"Traceback" not in (tmp_path / "state" / "jobs" / "1" / "1.out").read_bytes()

    launchers = Launchers(tmp_path / "state")
    assert launchers.adopt(endless, first) is None
    assert change(launchers) == Change(1, 1)
    wait_for_line(tmp_path / "run" / "metrics.jsonl", "loss")
    lock = json.loads((tmp_path / "run" / ".lock").read_bytes())
    assert lock["start"].startswith("1-0.")  # the next attempt waits for ranks of this one, if hosts are cut off
    launchers.stop(endless, first, now=False)
    ended = change(launchers)
    done = summary(tmp_path / "run")
    assert done["status"] == "stopped"
    assert ended.exit is not None
    assert ended == Change(1, 1, Exit(1, "it was asked to stop", ended.exit.step, stopped="request"))
    assert (ended.exit.step or 0) <= done["steps"]  # that of the last heartbeat that came before the end
    told = json.loads((tmp_path / "state" / "jobs" / "1" / "1.exit").read_text())
    assert told["hosts"] == ["localhost"]

    finite, second = job(tmp_path, corpus, done["steps"] + 3), Attempt(1, 2, (Placement("localhost", 2),), 0.0)
    launchers.start(finite, second, {})
    assert change(launchers) == Change(1, 2)
    ended = change(launchers)
    assert ended.exit is not None and (ended.exit.code, ended.exit.cause) == (0, "")
    assert [step for step, _ in steps(tmp_path / "run", "loss")] == list(range(1, done["steps"] + 4))
    launchers.close()


def test_an_elastic_job_grows(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus" / "text", train=20_000)
    elastic, small = job(tmp_path, corpus, 100_000, min_ranks=1), (Placement("localhost", 1),)
    launchers, first = Launchers(tmp_path / "state"), Attempt(1, 1, small, 0.0)
    launchers.start(elastic, first, {})
    assert change(launchers) == Change(1, 1)
    wait_for_line(tmp_path / "run" / "metrics.jsonl", "loss")
    launchers.write_hosts(elastic, (Placement("localhost", 2),))
    log = tmp_path / "run" / "logs" / "launch.log"
    wait_for_line(log, "resuming: 2 ranks on localhost")
    wait_for_line(log, "2 ranks over gloo")
    (launcher,) = launchers.pids()
    os.kill(launcher, signal.SIGTERM)  # as when this machine is shut down
    ended = change(launchers).exit
    assert ended is not None and (ended.code, ended.cause, ended.lost) == (1, "it was asked to stop", ())
    assert ended.stopped == "SIGTERM"
    assert summary(tmp_path / "run")["world"] == 2
    launchers.close()


def test_hosts_that_cannot_be_used_are_not_taken_for_wrong_input(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus" / "text", train=2_000)
    launchers = Launchers(tmp_path / "state")
    wanted = job(tmp_path, corpus, 3)
    launchers.start(wanted, Attempt(1, 1, (Placement("no.such.host.invalid", 2),), 0.0), {})
    refused = change(launchers).exit
    assert refused is not None and refused.code == 2
    assert "unknown host name" in refused.refused["no.such.host.invalid"]
    wrong = job(tmp_path, corpus, -3)
    launchers.start(wrong, Attempt(1, 2, (Placement("localhost", 2),), 0.0), {})
    exit = change(launchers).exit
    assert exit is not None and (exit.code, exit.refused, exit.lost) == (2, {}, ())
    assert "training.max_steps" in exit.cause
    assert not (tmp_path / "run").exists()
    missing = job(tmp_path, tmp_path / "nowhere", 3)  # found by the ranks
    launchers.start(missing, Attempt(1, 3, (Placement("localhost", 2),), 0.0), {})
    assert change(launchers) == Change(1, 3)
    ended = change(launchers).exit
    assert ended is not None and ended.code == 2
    assert f"hvd-train: data.source={tmp_path / 'nowhere'}: no such file" in ended.cause
    log = (tmp_path / "run" / "logs" / "launch.log").read_text(encoding="utf-8")
    assert f"hvd-train: data.source={tmp_path / 'nowhere'}" in log
    launchers.close()

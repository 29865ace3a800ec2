"""Shared by the distributed tests: a tiny corpus and model, jobs to send signals to, what a run left on disk."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from conftest import BIN, launcher, rank_environment
from safetensors.torch import load_file
from torch import Tensor

WORKERS = Path(__file__).parent / "workers"
FAULTY = [BIN / "python", WORKERS / "faulty.py"]
TRAIN = BIN / "hvd-train"
SIZE = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_feedforward": 32}
_MARK = "HOROVOD_TEST_JOB"  # of the environment, `launch` passes on what begins with HOROVOD_


def write_corpus(folder: Path, train: int, valid: int = 150, test: int = 90) -> Path:
    """train.txt, valid.txt and test.txt of so many characters each: words that a tiny model can learn."""
    folder.mkdir(parents=True)
    rng = random.Random(5)
    for name, size in {"train": train, "valid": valid, "test": test}.items():
        text = ""
        while len(text) < size:
            text += rng.choice(["the ", "cat ", "sat ", "on ", "my ", "big ", "red ", "rug.\n", "hat; "])
        (folder / f"{name}.txt").write_text(text[:size], encoding="utf-8")
    return folder


def tiny(source: Path) -> list[str]:
    """Settings of a model of two layers, width 16, on characters of `source`; its token files lie beside it."""
    return [
        f"data.source={source}",
        f"data.cache_dir={source.parent / 'cache'}",
        "data.tokenizer=char",
        "data.sequence_length=12",
        "data.workers=1",
        *(f"model.{key}={value}" for key, value in SIZE.items()),
        "training.device=cpu",
        "training.log_every=1",
    ]


def weights(run: Path) -> dict[str, Tensor]:
    """The run's newest weights by name."""
    return load_file(run / "checkpoints" / "latest" / "model.safetensors")


def state(run: Path) -> dict:
    """The newest checkpoint's state."""
    return json.loads((run / "checkpoints" / "latest" / "state.json").read_text(encoding="utf-8"))


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def lines(run: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def steps(run: Path, *keys: str) -> list[tuple]:
    """(step, values of the keys) of every training line."""
    return [(line["step"], *(line[key] for key in keys)) for line in lines(run) if "loss" in line]


def relative_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of any weight, relative to the largest of its tensor."""
    assert found.keys() == wanted.keys()
    return max(
        float((found[name].double() - wanted[name].double()).abs().max() / wanted[name].double().abs().max())
        for name in wanted
    )


@dataclass(frozen=True)
class Process:
    """A process of a job. The start time tells it from a later one with the same number."""

    pid: int
    started: str
    rank: int | None  # None: the launcher and its helpers

    def kill(self, number: int = signal.SIGKILL) -> None:
        if _stat(self.pid) == self.started:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Job:
    """A launched job: its output goes to a file, and its processes are found by a mark in their environment."""

    def __init__(self, num_ranks: int, command: Sequence[str | Path], backend: str, output: Path) -> None:
        self.mark = f"{_MARK}={uuid4().hex}"
        self.output = output
        name, _, value = self.mark.partition("=")
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                [*launcher(num_ranks, backend), *map(str, command)],
                env={**rank_environment(), name: value},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[Process]:
        """All that live now, wherever they were adopted."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                started = _stat(int(folder.name))
            except OSError:
                continue
            if self.mark in words and started is not None:
                found.append(Process(int(folder.name), started, _rank(words)))
        return found

    def ranks(self) -> dict[int, Process]:
        """The ranks' processes; the launcher itself where there is one rank without a launcher."""
        found = self.processes()
        return {process.rank: process for process in found if process.rank is not None} or {0: found[0]}

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None

    def wait_gone(self, seconds: float) -> None:
        """Until no process of the job is left."""
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind: {left}\n{self.text()}"
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to all of the launcher's process group."""
        os.killpg(self.popen.pid, signal.SIGINT)

    def end(self) -> None:
        for process in self.processes():
            process.kill()
        self.popen.wait(10)


@contextmanager
def started(num_ranks: int, command: Sequence[str | Path], backend: str, output: Path) -> Iterator[Job]:
    """A job in the background; whatever of it is left at the end is killed."""
    pytest.importorskip("horovod", reason="needs Horovod")
    job = Job(num_ranks, command, backend, output)
    try:
        yield job
    finally:
        job.end()


def _stat(pid: int) -> str | None:
    """The process's start time; None where it is gone or waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _rank(environment: list[str]) -> int | None:
    for name in ("HOROVOD_RANK=", "OMPI_COMM_WORLD_RANK="):
        for word in environment:
            if word.startswith(name):
                return int(word.removeprefix(name))
    return None

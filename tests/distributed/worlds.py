"""Worlds of ranks that are started once and run many cases: most of a short job is its start.

    world(2).train(["optimizer.lr=1", …], …)                   # hvd-train on two ranks over gloo
    done = world(3, "mpi").command("hvd-transformer", "evaluate", run)
    results = world(2).call("faults:corrupt", 1, 20)           # a function of tests/distributed/workers, by rank

A case that breaks its world, by a crash or because some ranks wait for others, costs a new one. A world of one rank is
this process.
"""

import importlib
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from unittest.mock import patch

from commands import Done, captured, command
from conftest import BIN
from jobs import WORKERS, Job

from hvd_transformer.reporting import run_report

START_SECONDS = 120
BEHIND_SECONDS = 30  # that a rank may be later than the first
CLOSE_SECONDS = 20


class Answer(NamedTuple):
    """What came of a case on one rank."""

    code: int
    out: str
    err: str
    result: Any


class Ranks:
    """The ranks of a world; here one, in this process."""

    size = 1

    def command(
        self,
        program: str,
        *words: object,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = 240,
    ) -> Done:
        """Runs it on all ranks: the largest exit code, and what all of them printed."""
        given = [program, *map(str, words)]
        return _together(given, self._run("command", [given] * self.size, folder, environment, timeout))

    def commands(self, *each: Sequence[object], timeout: float = 240) -> Done:
        """The same with the words of each rank."""
        words = [list(map(str, own)) for own in each]
        return _together(words[0], self._run("command", words, None, None, timeout))

    def train(self, *runs: Sequence[object], timeout: float = 240) -> None:
        """Runs `hvd-train` with these settings, one after the other; none may fail."""
        for words in runs:
            done = self.command("hvd-train", *words, timeout=timeout)
            assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}"

    def call(self, function: str, *arguments: Any, timeout: float = 240) -> list[Any]:
        """What `module:function` of tests/distributed/workers returned, by rank. Raises with all ranks' errors."""
        answers = self._run("call", [[function, *arguments]] * self.size, None, None, timeout)
        failed = [f"rank {rank}: {one.out}{one.err}" for rank, one in enumerate(answers) if one.code]
        assert not failed, "\n".join(failed)
        return [one.result for one in answers]

    def _run(
        self, kind: str, each: Sequence[list[Any]], folder: Path | None, environment: Mapping[str, str] | None, _: float
    ) -> list[Answer]:
        (words,) = each
        with patch.object(run_report, "write_report", lambda run: run):
            if kind == "command":
                done = command(*words, folder=folder, environment=environment)
                return [Answer(done.returncode, done.stdout, done.stderr, None)]
            with patch.object(sys, "path", [str(WORKERS), *sys.path]):
                module, _, name = words[0].partition(":")
                function = getattr(importlib.import_module(module), name)
                return [Answer(*captured(lambda: function(*words[1:]), folder, environment=environment))]

    def close(self) -> None:
        """Ends the ranks."""


class World(Ranks):
    """Several ranks under horovodrun, over gloo or mpi."""

    def __init__(self, size: int, backend: str) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="hvd-transformer-world-")
        with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
            words = [BIN / "python", WORKERS / "world.py", str(server.getsockname()[1])]
            self._job = Job(size, words, backend, Path(self._folder.name) / "output")
            self.broken, self._text = False, ""
            try:
                self._ranks = self._accept(server)
            except BaseException:
                self.kill()
                raise

    def _accept(self, server: socket.socket) -> list[Any]:
        found, deadline = {}, time.monotonic() + START_SECONDS
        while len(found) < self.size:
            if not select.select([server], [], [], 0.2)[0]:
                assert self._job.popen.poll() is None and time.monotonic() < deadline, self._job.text()
                continue
            connection, _ = server.accept()
            lines = connection.makefile("rw", encoding="utf-8")
            found[json.loads(lines.readline())["rank"]] = connection, lines
        return [found[rank] for rank in range(self.size)]

    def _run(
        self,
        kind: str,
        each: Sequence[list[Any]],
        folder: Path | None,
        environment: Mapping[str, str] | None,
        timeout: float,
    ) -> list[Answer]:
        assert not self.broken
        place = str(folder or Path.cwd())
        self.broken = True  # until all have answered
        for (_, lines), words in zip(self._ranks, each, strict=True):
            case = {"kind": kind, "words": words, "folder": place, "environment": dict(environment or {})}
            lines.write(json.dumps(case, default=str) + "\n")
            lines.flush()
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size:
            waiting = {own[0]: rank for rank, own in enumerate(self._ranks) if rank not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, min(1.0, deadline - time.monotonic())))
            for connection in ready:
                line = self._ranks[waiting[connection]][1].readline()
                if not line:
                    self._fail(f"rank {waiting[connection]} is gone", answers)
                answers[waiting[connection]] = Answer(**json.loads(line))
                deadline = min(deadline, time.monotonic() + BEHIND_SECONDS)
            if time.monotonic() > deadline:
                self._fail(f"no answer of rank {', '.join(map(str, sorted(waiting.values())))}", answers)
        found = [answers[rank] for rank in range(self.size)]
        # Where a command fails by a fault of ours, what it sent may still be on its way.
        self.broken = any("Traceback" in one.err for one in found)
        return found

    def _fail(self, what: str, answers: Mapping[int, Answer]) -> None:
        self.kill()
        told = [f"rank {rank}: exit code {one.code}\n{one.out}{one.err}" for rank, one in sorted(answers.items())]
        raise AssertionError("\n".join([what, *told, self._text]))

    def kill(self) -> None:
        self.broken = True
        if not self._text:
            self._job.end()
            self._text = f"its screen:\n{self._job.text()}"
            self._folder.cleanup()

    def close(self) -> None:
        """Ends it in good order, if it can."""
        if not self.broken:
            for connection, lines in self._ranks:
                lines.close()
                connection.close()
            try:
                self._job.popen.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"a world of {self.size} did not end:\n{self._job.text()}", file=sys.stderr)
        self.kill()


class Worlds:
    """The worlds of a session, by size and backend; each begins when it is first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[int, str], World] = {}

    def __call__(self, size: int, backend: str = "gloo") -> Ranks:
        if size == 1:
            return Ranks()
        found = self._worlds.get((size, backend))
        if found is not None and found.broken:
            found.close()
            found = None
        if found is None:
            found = self._worlds[size, backend] = World(size, backend)
        return found

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for world in self._worlds.values():
            world.close()


def _together(words: Sequence[str], answers: Sequence[Answer]) -> Done:
    out, err = ("".join(getattr(one, name) for one in answers) for name in ("out", "err"))
    return subprocess.CompletedProcess(words, max(one.code for one in answers), out, err)

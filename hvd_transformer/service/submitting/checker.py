"""Checks what is submitted in a process of its own, `cli/job_checker.py`: the service never imports torch.

The process is started when it is needed, ends by itself when it is idle, and may crash: the next request starts a new
one.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Engine, Job
from hvd_transformer.service.submitting.not_now import NotNow

_START_SECONDS = 30.0
_END_SECONDS = 5.0


@dataclass(frozen=True)
class CheckedJob:
    """One set of arguments of hvd-train, complete.

    `config`: by dotted key, and `words`: what differs from the defaults; both without `output_dir`, which is absolute,
    or None if the user has chosen none. `name`: for a job without one. `launch`: options of `launch`, with what they
    depend on here and now filled in.
    """

    config: dict[str, Any]
    words: list[str]
    tensor: int
    pipeline: int
    device: str
    output_dir: str | None
    name: str
    num_ranks: int
    launch: list[str]


@dataclass(frozen=True)
class Checked:
    """All jobs of a request. `code`: the name of the snapshot of the user's own code, or empty."""

    jobs: list[CheckedJob]
    code: str


class Checker:
    """The checking process. Any thread may call `check`; they take turns. A fault of the process raises `NotNow`.

    `code`: the folder for snapshots of users' code. The process ends after `idle` seconds without a request; a request
    may take `limit` seconds.
    """

    def __init__(self, code: Path, idle: float = 60.0, limit: float = 30.0) -> None:
        self._code, self._idle, self._limit = code.absolute(), idle, limit
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def check(
        self,
        folder: str,
        jobs: Sequence[Sequence[str]],
        launch: Sequence[str] = (),
        num_ranks: int | None = None,
        min_ranks: int | None = None,
        engine: Engine = Engine.HOSTS,
        env_names: Sequence[str] = (),
        runs: Path | None = None,
    ) -> Checked:
        """Resolve the arguments of hvd-train for each job, as submitted in `folder`, and keep the code that they name.

        `launch`: options of `launch`. Jobs of another engine are also made into job files, with run directories in
        `runs`. Raises `UserError` with the line that hvd-train or `launch` would print.
        """
        request = {
            "folder": folder, "jobs": jobs, "launch": launch, "num_ranks": num_ranks, "min_ranks": min_ranks,
            "code": str(self._code), "engine": engine.value, "env_names": env_names, "runs": str(runs),
        }  # fmt: skip
        answer = self._answer(request)
        return Checked([CheckedJob(**job) for job in answer["jobs"]], answer["code"])

    def job_file(self, job: Job, name: str) -> str:
        """The job file of a job for its engine; what it makes is named `name`. Raises `UserError`."""
        needs = job.needs
        request = {
            "folder": job.folder, "words": job.words, "launch": job.launch, "engine": job.engine.value, "name": name,
            "num_ranks": needs.num_ranks, "min_ranks": needs.min_ranks if needs.min_ranks < needs.num_ranks else None,
            "env_names": job.env_names,
        }  # fmt: skip
        return str(self._answer(request)["job_file"])

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            answer = self._ask(json.dumps(request).encode() + b"\n")
        if "error" in answer:
            raise UserError(answer["error"])
        return answer

    @property
    def pid(self) -> int | None:
        """The process, if one has been started and has not ended."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def close(self) -> None:
        """End the process."""
        with self._turn:
            self._end()

    def _ask(self, request: bytes) -> dict[str, Any]:
        fresh = self.pid is None
        if (answer := self._try(request)) is None and not fresh:  # it was just ending, as it had been idle
            answer = self._try(request)
        if answer is None:
            raise NotNow("the process that checks configurations does not start; see the service's output")
        return answer

    def _try(self, request: bytes) -> dict[str, Any] | None:
        """The answer; None if the process has ended by itself. Raises `NotNow` if it has crashed or hangs."""
        if self.pid is None:
            try:
                self._start()
            except OSError as error:  # no memory, or too many open files
                raise NotNow(f"the process that checks configurations does not start: {error.strerror}") from None
        assert self._socket is not None and self._process is not None
        data = bytearray()
        deadline = time.monotonic() + _START_SECONDS + self._limit
        try:
            self._socket.settimeout(max(0.1, deadline - time.monotonic()))
            self._socket.sendall(request)
            while not data.endswith(b"\n"):
                self._socket.settimeout(max(0.1, deadline - time.monotonic()))
                part = self._socket.recv(1 << 20)
                if not part:
                    break
                data += part
        except TimeoutError:
            self._end()
            raise NotNow("the process that checks configurations does not answer; try again") from None
        except OSError:  # it is gone
            data.clear()
        if data.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(data)
            return answer
        code = self._end()
        if code == 0:
            return None
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise NotNow(f"the process that checks configurations has ended with {how}; try again")

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HVD_TRANSFORMER_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hvd_transformer.cli.job_checker", str(self._idle), str(self._limit)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                cwd="/",  # `python -m` imports from there first; Python 3.10 knows no way to turn it off
                env={**environment, "PYTHONSAFEPATH": "1"},
            )
        self._socket = ours

    def _end(self) -> int:
        """Its exit code, once it has ended."""
        if self._socket is not None:
            self._socket.close()
        if self._process is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_SECONDS)
        self._process.kill()
        return self._process.wait()

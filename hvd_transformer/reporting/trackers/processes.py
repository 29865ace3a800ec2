"""Rank 0's side of the trackers: starts their processes, tells them what to follow, and waits for them at the end."""

import hashlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from hvd_transformer import atomic
from hvd_transformer.config import Config
from hvd_transformer.config.schema import flatten
from hvd_transformer.errors import UserError, missing_extra

FILE = "tracking.json"  # in the run directory: the id of the run
_MODULE = "hvd_transformer.reporting.trackers.tracker_process"
_CHECK_SECONDS = 120.0
_END_SECONDS = 60.0
_STOP_SECONDS = 10.0  # whoever stops a job kills it soon; the resumed run sends the rest
# A start may differ from the one before in these, and still repeat its steps.
_WITHOUT_EFFECT = ("checkpoint.resume", "output_dir", "tracking", "tracking_project")


class Trackers:
    """The trackers of `tracking`; none on other ranks than 0. No call but `check` and `end` ever waits."""

    def __init__(self, names: Sequence[str]) -> None:
        """Start the processes, which look meanwhile whether they have their keys. Raises `UserError`."""
        for name in names:
            if find_spec(name) is None:
                raise missing_extra(f"tracking={name}", name, name)
        self._processes = {name: _start(name) for name in names}
        self._heard = dict.fromkeys(names, b"")

    def check(self) -> None:
        """Raise `UserError` if a tracker lacks its key or cannot be used."""
        deadline = time.monotonic() + _CHECK_SECONDS
        for name in self._processes:
            word, _, text = self._wait_for_line(name, deadline).partition(" ")
            if word != "ready":
                raise UserError(f"tracking={name}: {text or 'its process ended before it was ready'}")

    def follow(self, folder: Path, config: Config, resume_step: int) -> None:
        """Send what is in metrics.jsonl from now on."""
        if not self._processes:
            return
        flat = flatten(config)
        job = {
            "id": run_id(folder, flat, resume_step),
            "name": folder.resolve().name,
            "project": config.tracking_project,
            "folder": str(folder.absolute()),
            "config": flat,
        }
        self._order({"follow": job})

    def news(self) -> list[str]:
        """What the trackers have to say, such as that a server does not answer."""
        lines: list[str] = []
        for name, process in list(self._processes.items()):
            heard, ended = self._hear(name)
            lines += [line.partition(" ")[2] for line in heard if line.startswith("told ")]
            if ended:
                process.wait()
                del self._processes[name]
                code = process.returncode
                lines.append(f"{name}: its process ended (exit code {code}); the same command sends what is missing")
        return lines

    def end(self, status: str, summary: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        """Send the rest and end the run; waits for that, but not for a server that does not answer."""
        self._order({"end": {"status": status, "summary": dict(summary)}})
        deadline = time.monotonic() + (_END_SECONDS if status == "finished" else _STOP_SECONDS)
        waiting, unsent = set(self._processes), list[str]()
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            poll = select.poll()
            for name in waiting:
                poll.register(self._stream(name), select.POLLIN)
            poll.poll(seconds * 1000)  # all together: one that hangs takes no other's time
            for name in list(waiting):
                heard, ended = self._hear(name)
                for line in heard:
                    if line.startswith("told "):
                        warn(line.partition(" ")[2])
                if "done" in heard or ended:
                    waiting.remove(name)
                    unsent += [] if "done" in heard else [name]
        for name in (*unsent, *waiting):
            warn(f"{name}: not everything was sent; the same command sends the rest")
            self._processes[name].kill()
        self.close()

    def close(self) -> None:
        """Let the processes go: one that still has a run open ends it as failed."""
        for process in self._processes.values():
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        self._processes.clear()

    def _order(self, order: Mapping[str, Any]) -> None:
        line = json.dumps(order).encode() + b"\n"
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):  # it has ended, which `news` and `end` notice
                process.stdin.write(line)

    def _wait_for_line(self, name: str, deadline: float) -> str:
        while time.monotonic() < deadline:
            heard, ended = self._hear(name, deadline)
            if heard:
                return heard[0]
            if ended:
                return ""
        return f"refused did not start within {_CHECK_SECONDS:.0f} s"

    def _stream(self, name: str) -> IO[bytes]:
        stream = self._processes[name].stdout
        assert stream is not None
        return stream

    def _hear(self, name: str, deadline: float | None = None) -> tuple[list[str], bool]:
        """The whole lines that a process has written, and whether it has ended; waits for either until `deadline`."""
        stream = self._stream(name)
        seconds = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
        poll = select.poll()  # takes any descriptor, select() those below 1024
        poll.register(stream, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return [], False
        data = os.read(stream.fileno(), 65536)
        *lines, self._heard[name] = (self._heard[name] + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines], not data


def run_id(folder: Path, config: Mapping[str, Any], resume_step: int) -> str:
    """The id of the run in all trackers: the one in `folder`, unless this start is another run, from step 0 and with
    other settings."""
    file = folder / FILE
    settings = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT}
    made_with = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    try:
        known = json.loads(file.read_bytes())
        if isinstance(known, dict) and (resume_step or known["settings"] == made_with):
            return str(known["id"])
    except (OSError, ValueError, KeyError):
        pass
    made = secrets.token_hex(4)
    with suppress(OSError):  # a full disk: the run goes on, and a resumed one is another
        atomic.write_text(file, json.dumps({"id": made, "settings": made_with}) + "\n")
    return made


def _start(name: str) -> "subprocess.Popen[bytes]":
    # In a session of its own: Ctrl-C is for the ranks, which save first.
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, name],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )

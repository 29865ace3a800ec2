"""Sees a launched job from another process and stops it: the other side of `launch_server`."""

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvd_transformer.errors import UserError
from hvd_transformer.launch.agents import Failure
from hvd_transformer.launch.attempt import AttemptResult
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.launch_record import launcher_of
from hvd_transformer.launch.output.launch_screen import Screen
from hvd_transformer.launch.output.launch_server import Event, is_trusted

_KILLED_SECONDS = 0.5  # for the kernel to close what a killed process had open


class LaunchClient:
    """A connection to the launcher of a run directory. Raises `UserError` if there is none that this host reaches."""

    def __init__(self, folder: Path) -> None:
        launcher = launcher_of(folder)
        if not launcher.here:
            raise UserError(f"{folder}: its launcher is on host {launcher.host}; run this command there")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)  # a launcher that is suspended accepts nobody: once many wait, no more may
        try:
            self._socket.connect(f"\0{launcher.more['socket']}")
        except OSError as error:
            self._socket.close()
            reason = error.strerror or str(error)
            raise UserError(f"{folder}: {launcher.words} does not answer: {reason}") from None
        if os.geteuid() != 0 and not is_trusted(self._socket):  # root may see the jobs of all users
            self._socket.close()
            raise UserError(f"{folder}: another user answers in place of {launcher.words}")
        self._socket.setblocking(True)

    def ask(self, what: str) -> None:
        """Ask the launcher to "stop" the job, whose ranks then save, or to "kill" it."""
        self._socket.sendall(json.dumps({"do": what}).encode() + b"\n")

    def show(self) -> int | None:
        """Show the job until it ends; returns its exit code, or None if its launcher tells no more."""
        screen = Screen()
        try:
            for event in self._events():
                if event["event"] == "exit":
                    return int(event["code"])
                _show(screen, **event)
        finally:
            screen.end()
        return None

    def close(self) -> None:
        self._socket.close()

    def _events(self) -> Iterator[Event]:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield json.loads(line)


def why_it_ended(folder: Path) -> str:
    """Why the launcher of a run directory tells no more, in words."""
    time.sleep(_KILLED_SECONDS)
    try:
        LaunchClient(folder).close()
    except UserError:
        return "its launcher was killed"
    return "the launcher closed the connection, as its output was not read for too long; the job runs on: attach again"


def _show(screen: Screen, event: str, **values: Any) -> None:
    if event == "start":
        screen.start([Host(*host) for host in values["hosts"]], values["restart"])
    elif event == "look":
        screen.look({beat["rank"]: beat for beat in values["beats"]})
    elif event == "show":
        screen.show(**values)
    elif event == "message":
        screen.message(**values)
    elif event == "failed":
        first = None if values["first"] is None else Failure(*values["first"])
        ended = AttemptResult(values["code"], first, values["lost"], False, {}, values["said"])
        screen.failed(ended, values["cause"])
    elif event == "end":
        screen.end(**values)

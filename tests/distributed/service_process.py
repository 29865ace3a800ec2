"""A service of real processes on a test host: `hvd-transformer serve`, and the commands that talk to it."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from conftest import BIN, rank_environment
from hosts import Hosts
from jobs import WORKERS

PROGRAM = BIN / "hvd-transformer"


class ServiceProcess:
    """A service on host h1 with its folders below `folder`, from construction to `close`.

    `where`: its own hosts, or empty. `program`: is called in place of `hvd-transformer` for `serve`.
    """

    def __init__(
        self, hosts: Hosts, folder: Path, where: str, *options: str, program: Sequence[str | Path] = (PROGRAM,)
    ) -> None:
        self._hosts, self.folder, self._where, self._options = hosts, folder, where, options
        self._program = program
        self.runs, self._log = folder / "runs", folder / "serve.log"
        self.environment = {
            "HOROVOD_TEST_PACE": "0.2",  # `launch` passes on what begins with HOROVOD_
            **rank_environment(),
            "XDG_DATA_HOME": str(folder / "data"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "PYTHONPATH": f"{WORKERS}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
        }
        self.url = ""
        self.process = self._start()

    def command(self, *words: object, user: str | None = None, code: int = 0, timeout: float = 60) -> str:
        """What a command prints. As `user` it is given over HTTP, with a token of that user."""
        environment = dict(self.environment)
        if user is not None:
            environment |= {"HVD_TRANSFORMER_SERVER": self.url, "HVD_TRANSFORMER_TOKEN": self.token(user)}
        words = (PROGRAM, *map(str, words))
        done = self._hosts.run("h1", words, env=environment, cwd=self.folder, timeout=timeout)
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}{self.log()}"
        return done.stdout + (done.stderr if code else "")

    def submit(self, *words: object, user: str | None = None) -> list[int]:
        """The jobs that this makes."""
        return list(json.loads(self.command("submit", "--json", *words, user=user))["ids"])

    def token(self, user: str) -> str:
        """A token of that user, who may submit."""
        if user not in self._tokens:
            words = ["token", "add", user, "--owner", user, "--role", "submit", "--json"]
            self._tokens[user] = json.loads(self.command(*words))["token"]
        return self._tokens[user]

    _tokens: dict[str, str]

    def job(self, number: int) -> dict[str, Any]:
        """What `show` tells of a job."""
        return dict(json.loads(self.command("show", number, "--json"))["job"])

    def step(self, number: int) -> int:
        """The last step of a job's run that has been seen."""
        run = json.loads(self.command("show", number, "--json"))["run"]
        return 0 if run is None else int(run["step"] or 0)

    def states(self) -> dict[int, str]:
        """The states of all jobs."""
        return {job["id"]: job["state"] for job in json.loads(self.command("queue", "--all", "--json"))["jobs"]}

    def wait_for(self, what: Callable[[], Any], seconds: float = 120) -> Any:
        """Until that is true; returns it."""
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, f"{self.states()}\n{self.log()}"
            time.sleep(0.1)
        return found

    def wait_for_state(self, number: int, *states: str, seconds: float = 120) -> str:
        """Until the job has one of these states."""
        return str(self.wait_for(lambda: (state := self.states()[number]) in states and state, seconds))

    def kill(self) -> None:
        """SIGKILL to the service alone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """Start the service again, as after its death."""
        self.process = self._start()

    def log(self) -> str:
        """What the service has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the service and the jobs that are left."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            for number, state in self.states().items():
                if state in ("STARTING", "RUNNING", "STOPPING"):
                    self.command("cancel", "--now", number)
            self.wait_for(lambda: not {"STARTING", "RUNNING", "STOPPING"} & set(self.states().values()), 30)
        self.process.terminate()
        self.process.wait(30)

    def _start(self) -> "subprocess.Popen[bytes]":
        self._tokens = getattr(self, "_tokens", {})
        begun = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as file:
            words: Sequence[str | Path] = [
                *self._program, "serve", *(["-H", self._where] if self._where else []), "--port", "0",
                "--runs", self.runs, *self._options,
            ]  # fmt: skip
            process = self._hosts.popen(
                "h1", words, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        deadline = time.monotonic() + 60
        while not (found := re.search(r"open: +(http://\S+)/#token=", self.log()[begun:])):
            assert process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        self.url = found[1]
        return process

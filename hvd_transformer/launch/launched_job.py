"""One launch of a job as others see it: the launcher's lock, socket, log and exit.json, from its start to its end."""

import sys
import threading
from functools import partial
from pathlib import Path
from types import TracebackType

from hvd_transformer.errors import WRONG_INPUT, UserError
from hvd_transformer.launch.detach import is_detached, leave_terminal
from hvd_transformer.launch.launch_record import LaunchRecord
from hvd_transformer.launch.output.launch_log import LaunchLog
from hvd_transformer.launch.output.launch_server import LaunchServer
from hvd_transformer.launch.output.outlet import Outlet
from hvd_transformer.launch.supervisor import Supervisor

_END_SECONDS = 10.0  # for exit.json to be written


class LaunchedJob:
    """A context manager; raises `UserError` if another launcher is at work on the run directory.

    Once the job runs nobody waits for the storage of the run directory, which may stand still.

    `code` is the exit code to tell in the end.
    """

    def __init__(self, run: Path) -> None:
        self.code = 1
        self.log = LaunchLog(run / "logs" / "launch.log")
        self.server = LaunchServer(self._ask)
        self._record = LaunchRecord(run, self.server.name)
        self._supervisor: Supervisor | None = None
        self._asked: list[bool] = []  # before there was a supervisor: whether to stop at once
        self._lock = threading.Lock()
        self._begun = False
        self._outlet = Outlet("launch record")

    def __enter__(self) -> "LaunchedJob":
        try:
            self._record.claim(lambda line: print(f"hvd-transformer: {line}", file=sys.stderr, flush=True))
        except BaseException:
            self.server.close(self.code)
            raise
        return self

    def begun(self) -> None:
        """The ranks run."""
        self._begun = True
        self.log.make_folder = is_detached()
        self._outlet.put(self._record.begun)
        leave_terminal()

    def watch(self, supervisor: Supervisor) -> None:
        """Let others stop the job; its `how` is told in the end."""
        with self._lock:
            self._supervisor = supervisor
            for now in self._asked:
                supervisor.ask_to_stop(now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError):
            self.code = WRONG_INPUT
        if self._begun and self._supervisor is not None:
            self._outlet.put(partial(self._record.ended, {"code": self.code, **self._supervisor.how()}))
        self._outlet.put(self._record.close)
        self._outlet.close(_END_SECONDS)  # first: who is told of the end may look for exit.json
        self.server.close(self.code)

    def _ask(self, what: str) -> None:
        with self._lock:
            if self._supervisor is None:
                self._asked.append(what == "kill")
            else:
                self._supervisor.ask_to_stop(now=what == "kill")

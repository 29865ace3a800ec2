"""What horovodrun starts on each rank: the parent of hvd-train, which notes its process and its exit code.

    python -m hvd_transformer.launch.worker FOLDER COMMAND...

FOLDER is the job's private folder on this host (`folder.py`). horovodrun turns every exit code into 1, and over ssh its
signals end only the local client: so the launcher reads the codes and signals the ranks through that folder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def main() -> int:
    """The command's exit code; 128 + N where signal N ended it, as in a shell."""
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "0")
    host = os.uname().nodename
    values = json.loads((folder / "environment").read_text(encoding="utf-8"))
    try:
        child = _Child(command, {**os.environ, **values})
    except OSError as error:
        print(f"hvd-transformer: {command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        return 127
    note = folder / f"running-{host}-{rank}"
    note.write_text(f"{child.pid}\n", encoding="utf-8")
    if (folder / "stopped").exists():  # asked for while the ranks were being started
        child.terminate()
    code = child.wait()
    with suppress(FileNotFoundError):  # the launcher is gone, or would wait no longer
        if code:
            (folder / f"failed-{rank}").write_text(f"failed {time.time()} {rank} {code} {host}\n", encoding="utf-8")
        note.unlink()
    return code


class _Child:
    """The command in a process group of its own; what asks this process to end asks it, as it may have to save."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        self._popen = subprocess.Popen(command, env=environment, start_new_session=True)
        self.pid = self._popen.pid
        if self._asked:
            self.terminate()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self.terminate()

    def terminate(self) -> None:
        if self._popen is not None:
            self._popen.terminate()

    def wait(self) -> int:
        """Its exit code; whatever it had started ends with it."""
        assert self._popen is not None
        code = self._popen.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

"""What horovodrun starts on each rank: the parent of hvd-train, which notes its process, output and exit code.

    python -m hvd_transformer.launch.rank_runner FOLDER COMMAND...

FOLDER is the job's private folder on this host (`keeper.py`). horovodrun turns every exit code into 1, puts a prefix
before each line, and over ssh its signals end only the local client: so all this goes through that folder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_FOLDER_SECONDS = 30.0
_SAVE_SECONDS = 120.0  # after a stop
_DAEMONS = ("orted", "hydra_pmi_proxy")  # of MPI, on each host but the launcher's


def main() -> int:
    """The command's exit code; 128 + N where signal N ended it, as in a shell."""
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    rank = int(next((os.environ[name] for name in _RANK if name in os.environ), "0"))
    place = f"{os.uname().nodename}-{rank}"
    values = json.loads(_wait_for(folder / "environment"))
    environment = {**os.environ, **values, "HVD_TRANSFORMER_FOLDER": str(folder), "PYTHONUNBUFFERED": "1"}
    with ExitStack() as stack:
        out, err = (stack.enter_context((folder / f"output-{place}.{name}").open("wb", 0)) for name in ("out", "err"))
        child = _Child(command, environment, out.fileno(), err.fileno())
        note = folder / f"running-{place}"
        with suppress(FileNotFoundError):
            if child.pid:
                _write(note, {"rank": rank, "child": child.pid, "worker": os.getpid(), "daemon": _daemon()})
        if (folder / "stopped").exists() or not folder.exists():  # asked for while the ranks were being started
            child.terminate()
        code = child.wait()
        with suppress(FileNotFoundError):  # the launcher is gone, or would wait no longer
            if code:
                _write(folder / f"failed-{place}", {"rank": rank, "code": code, "time": time.time()})
            note.unlink()
    deadline = time.monotonic() + _SAVE_SECONDS
    while (folder / "stopped").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # at the first exit code the others would be killed, and may still save
    return code


def _wait_for(file: Path) -> bytes:
    """What the keeper writes, which is started at the same time as the ranks."""
    deadline = time.monotonic() + _FOLDER_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return file.read_bytes()


class _Child:
    """The command in a process group of its own; what asks this process to end asks it, as it may have to save."""

    def __init__(self, command: list[str], environment: dict[str, str], out: int, err: int) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        try:
            self._popen = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            os.write(err, f"hvd-transformer: {command[0]}: cannot be started: {error.strerror}\n".encode())
        self.pid = self._popen.pid if self._popen else 0
        if self._asked:
            self.terminate()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self.terminate()

    def terminate(self) -> None:
        if self._popen is not None:
            self._popen.terminate()

    def wait(self) -> int:
        """Its exit code, 127 where it could not be started; whatever it had started ends with it."""
        if self._popen is None:
            return 127
        code = self._popen.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code


def _daemon() -> int:
    """MPI's own process on this host, which waits for its launcher where that cannot tell it to end."""
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return 0
    return parent if name in _DAEMONS else 0


def _write(file: Path, note: dict[str, float]) -> None:
    """Whole or not at all: the keeper may look at any time."""
    aside = file.with_name(f".{file.name}")
    aside.write_text(json.dumps(note), encoding="utf-8")
    aside.replace(file)


if __name__ == "__main__":
    sys.exit(main())

"""The process that horovodrun starts on each rank: the parent of hvd-train, which records its output and exit code.

    python -m hvd_transformer.launch.rank_runner FOLDER COMMAND...

FOLDER is the job's private folder on this host (`node_agent.py`). Output, exit codes and signals go through it because
horovodrun turns every exit code into 1, prefixes each line, and over ssh signals only the local client.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_FOLDER_SECONDS = 30.0
_SAVE_SECONDS = 120.0  # for all ranks to save after a stop
_DAEMONS = ("orted", "hydra_pmi_proxy")  # MPI's daemons, on each host except the launcher's


def main() -> int:
    """Return the command's exit code; 128 + N if signal N killed it, as in a shell."""
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    rank = int(next((os.environ[name] for name in _RANK if name in os.environ), "0"))
    place = f"{os.uname().nodename}-{rank}"
    file = folder / "environment"
    deadline = time.monotonic() + _FOLDER_SECONDS
    while not file.exists() and time.monotonic() < deadline:  # the node agent starts at the same time as the ranks
        time.sleep(0.02)
    values = json.loads(file.read_bytes())
    environment = {**os.environ, **values, "HVD_TRANSFORMER_FOLDER": str(folder), "PYTHONUNBUFFERED": "1"}
    with ExitStack() as stack:
        out, err = (stack.enter_context((folder / f"output-{place}.{name}").open("wb", 0)) for name in ("out", "err"))
        child = _Child(command, environment, out.fileno(), err.fileno())
        note = folder / f"running-{place}"
        with suppress(FileNotFoundError):
            if child.pid:
                _write(note, {"rank": rank, "child": child.pid, "worker": os.getpid(), "daemon": _daemon()})
        if (folder / "stopped").exists() or not folder.exists():  # asked to stop while the ranks were starting
            child.terminate()
        code = child.wait()
        with suppress(FileNotFoundError):  # the launcher is gone, or has stopped waiting
            if code:
                _write(folder / f"failed-{place}", {"rank": rank, "code": code, "time": time.time()})
            note.unlink()
    deadline = time.monotonic() + _SAVE_SECONDS
    while (folder / "stopped").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the first exit code makes horovodrun kill the other ranks, which may still be saving
    return code


class _Child:
    """The command in its own process group. Signals that ask this process to exit are forwarded to it."""

    def __init__(self, command: list[str], environment: dict[str, str], out: int, err: int) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.terminate)
        try:
            self._popen = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            os.write(err, f"hvd-transformer: {command[0]}: cannot be started: {error.strerror}\n".encode())
        self.pid = self._popen.pid if self._popen else 0
        if self._asked:
            self.terminate()

    def terminate(self, *_: object) -> None:
        self._asked = True
        if self._popen is not None:
            self._popen.terminate()

    def wait(self) -> int:
        """Return its exit code, or 127 if it could not be started; kill everything that it has started."""
        if self._popen is None:
            return 127
        code = self._popen.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code


def _daemon() -> int:
    """The process of MPI's daemon on this host, or 0; it outlives a launcher that cannot reach it."""
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return 0
    return parent if name in _DAEMONS else 0


def _write(file: Path, note: dict[str, float]) -> None:
    """Write the file atomically: the node agent may read it at any time."""
    aside = file.with_name(f".{file.name}")
    aside.write_text(json.dumps(note), encoding="utf-8")
    aside.replace(file)


if __name__ == "__main__":
    sys.exit(main())

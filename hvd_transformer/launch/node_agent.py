"""The process that runs on each host next to a job's ranks, for as long as the launcher is connected.

    python -m hvd_transformer.launch.node_agent FOLDER

FOLDER is the job's private folder, which the agent creates for its user only. The agent puts the ranks' environment
into it; the ranks put their heartbeats, output and exit codes there. The agent talks to the launcher in JSON, one
object per line: on standard input `{"environment": {...}}`, then `{"do": "stop" | "stacks" | "end" | "ping"}`; on
standard output `{"ready": true}`, then the news (`NodeAgent.news`). When the launcher exits, or is silent for a while,
the agent ends every rank on its host.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

_LOOK_SECONDS = 0.2  # between two reads of the folder
_QUIET_SECONDS = 1.0  # after which news is sent even if nothing has changed, as a sign of life
_SILENCE_SECONDS = 12.0  # without a word from the launcher: its host or the network is lost
_SAVE_SECONDS = 5.0  # for ranks to save when the launcher is gone
_OUTPUT_BYTES = 1 << 16  # read per rank at a time


class NodeAgent:
    """The job's folder on this host, its ranks and their state."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, os.uname().nodename
        self._ranks: dict[int, dict[str, int]] = {}  # process ids of each running rank
        self._failed: dict[int, dict[str, Any]] = {}
        # Output of the ranks, kept open: a host that shares /tmp may remove the files.
        self._files: dict[Path, BinaryIO] = {}
        self._speaks = True
        self._lock: IO[str] | None = None  # held while this process lives

    def open(self, environment: dict[str, str]) -> None:
        """Create the folder. Raises `OSError`."""
        os.umask(0o077)
        # Hosts may share /tmp: then one of them creates it for all.
        self.folder.mkdir(exist_ok=True)
        if self.folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{self.folder} belongs to another user")
        name = f"keeper-{self.host}-{os.getpid()}"
        self._lock = (self.folder / f".{name}").open("w", encoding="utf-8")
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # before other agents can find the file by its name
        (self.folder / f".{name}").replace(self.folder / name)
        _remove_leftovers(self.folder)
        aside = self.folder / f".environment-{self.host}-{os.getpid()}"
        aside.write_text(json.dumps(environment), encoding="utf-8")
        aside.replace(self.folder / "environment")
        try:
            (self.folder / f"speaks-{self.host}").touch(exist_ok=False)
        except FileExistsError:  # this host was listed twice
            self._speaks = False

    def news(self) -> dict[str, Any]:
        """The number of running ranks, their newest heartbeats, failed ranks, and output since the last news."""
        self._look()
        # Ages instead of times, as the hosts' clocks may differ.
        now = time.time()
        beats = [beat for beat in self._notes("beat-*") if beat["host"] == self.host]
        return {
            "running": len(self._ranks),
            "beats": [{**beat, "age": now - beat["time"]} for beat in beats],
            "failed": [
                {"age": now - note["time"], "rank": note["rank"], "code": note["code"], "host": self.host}
                for note in self._failed.values()
            ],
            "output": list(self._output()) if self._speaks else [],
        }

    def stop(self) -> int:
        """Ask the ranks to save and exit, including ranks that start later; return the number of running ranks."""
        with suppress(FileNotFoundError):
            (self.folder / "stopped").touch()
        self._look()
        running = len(self._ranks)
        self.signal(signal.SIGTERM)
        return running

    def signal(self, number: int) -> None:
        """Send a signal to the process of every rank."""
        for processes in self._ranks.values():
            with suppress(ProcessLookupError):
                os.kill(processes["child"], number)

    def end(self) -> None:
        """Kill every rank with all its children, and its parents on this host."""
        self._look()
        for processes in self._ranks.values():
            with suppress(ProcessLookupError):
                os.killpg(processes["child"], signal.SIGKILL)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and any(_lives(ranks["worker"]) for ranks in self._ranks.values()):
            time.sleep(0.01)
        for processes in self._ranks.values():
            for pid in (processes["worker"], processes["daemon"]):
                if pid and _lives(pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Let running ranks save, then kill them and remove the folder."""
        self.stop()
        deadline = time.monotonic() + _SAVE_SECONDS
        while self._ranks and time.monotonic() < deadline:
            time.sleep(0.05)
            self._look()
        self.end()
        for _ in range(2):  # the second pass takes what ranks were still writing
            shutil.rmtree(self.folder, ignore_errors=True)

    def _look(self) -> None:
        found = {note["rank"]: note for note in self._notes(f"running-{self.host}-*")}
        if not self.folder.exists():  # another host that shares it has removed it
            return
        self._ranks = found
        for note in self._notes(f"failed-{self.host}-*"):
            self._failed.setdefault(note["rank"], note)
        for rank, processes in list(self._ranks.items()):
            if _lives(processes["worker"]):
                continue
            del self._ranks[rank]
            with suppress(FileNotFoundError):  # the rank has just ended in order
                (self.folder / f"running-{self.host}-{rank}").unlink()
                # Killed: nobody else ends its children or reports it.
                self._failed.setdefault(rank, {"time": time.time(), "rank": rank, "code": 128 + signal.SIGKILL})
                with suppress(ProcessLookupError):
                    os.killpg(processes["child"], signal.SIGKILL)

    def _notes(self, pattern: str) -> Iterator[dict[str, Any]]:
        for file in self.folder.glob(pattern):
            with suppress(OSError, ValueError):  # removed meanwhile, or truncated by a full disk
                yield json.loads(file.read_bytes())

    def _output(self) -> Iterator[dict[str, Any]]:
        """Whole lines of output, and the rest after a rank has ended."""
        for path in self.folder.glob(f"output-{self.host}-*"):
            if path not in self._files:
                with suppress(OSError):
                    self._files[path] = path.open("rb")
        for path, file in self._files.items():
            rank, stream = path.name.removeprefix(f"output-{self.host}-").split(".")
            begin = file.tell()
            data = file.read(_OUTPUT_BYTES)
            if int(rank) in self._ranks and len(data) < _OUTPUT_BYTES:
                data = data[: data.rfind(b"\n") + 1]
                file.seek(begin + len(data))
            if data:
                yield {"rank": int(rank), "stream": stream, "text": data.decode(errors="replace")}


def _remove_leftovers(own: Path) -> None:
    """Remove folders of this user's agents that were killed, as when the host crashed: they hold the environment."""
    for folder in own.parent.glob("hvd-transformer-*"):
        with suppress(OSError), ExitStack() as locks:  # in use: the lock is held
            if folder.lstat().st_uid != os.geteuid():  # may contain anything, such as a pipe that blocks when opened
                continue
            held = list(folder.glob("keeper-*"))  # empty if an agent is only just starting
            for file in held:
                fcntl.flock(locks.enter_context(file.open(encoding="utf-8")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if held:
                shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    try:  # it has ended, or this is not Linux
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def main() -> int:
    """Serve the launcher; return 1 if the folder cannot be created."""
    agent = NodeAgent(Path(sys.argv[1]))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())
    try:
        with open(0, "rb", buffering=0, closefd=False) as orders:  # unbuffered: `select` must see the rest
            first = json.loads(orders.readline())
        agent.open(first["environment"])
    except (OSError, ValueError) as error:
        print(f"{agent.folder}: cannot be created: {error}", file=sys.stderr)
        return 1
    try:
        _say({"ready": True})
        _serve(agent)
    except (BrokenPipeError, SystemExit):
        pass
    finally:
        agent.close()
    return 0


def _serve(agent: NodeAgent) -> None:
    """Send news and take orders until the launcher ends the job, is gone or is silent."""
    heard = said = time.monotonic()
    before: tuple[int, int] | None = None
    unread = b""
    while time.monotonic() - heard < _SILENCE_SECONDS:
        if select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
            data = os.read(sys.stdin.fileno(), 1 << 16)
            if not data:
                return
            heard = time.monotonic()
            *lines, unread = (unread + data).split(b"\n")
            for order in (json.loads(line)["do"] for line in lines):
                if order == "stop":
                    _say({"stopping": agent.stop()})
                elif order == "stacks":
                    agent.signal(signal.SIGUSR1)
                elif order == "end":
                    news = agent.news()
                    agent.end()
                    _say({**news, "ended": True})
                    # Hosts may share the folder: their agents read it once more.
                    select.select([sys.stdin], [], [], _SAVE_SECONDS)
                    return
        news = agent.news()
        ranks = news["running"], len(news["failed"])
        if ranks != before or news["output"] or time.monotonic() - said > _QUIET_SECONDS:
            _say(news)
            before, said = ranks, time.monotonic()


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())

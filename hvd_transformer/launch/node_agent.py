"""What runs on each host beside a job's ranks, for as long as the launcher is connected.

    python -m hvd_transformer.launch.node_agent FOLDER

FOLDER is the job's private folder, which the keeper makes for its user alone: the ranks' environment goes in, and out
come their heartbeats, what they print, and their exit codes. One JSON object a line, on standard input
`{"environment": {...}}`, then `{"do": "stop" | "stacks" | "end" | "ping"}`; on standard output `{"ready": true}`, then
the news (`NodeAgent.news`). When the launcher ends, or is not heard of for a while, every rank here is ended.
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

_LOOK_SECONDS = 0.2  # between two looks into the folder
_QUIET_SECONDS = 1.0  # after which there is news even if there is none: a sign of life
_SILENCE_SECONDS = 12.0  # without a word from the launcher: its host or the network is gone
_SAVE_SECONDS = 5.0  # that ranks have when the launcher is gone
_OUTPUT_BYTES = 1 << 16  # of each rank, at a time


class NodeAgent:
    """The folder on this host, its ranks and what is known of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, os.uname().nodename
        self._ranks: dict[int, dict[str, int]] = {}  # the processes of each that runs, by rank
        self._failed: dict[int, dict[str, Any]] = {}
        self._files: dict[Path, BinaryIO] = {}  # what ranks print; open, as hosts that share /tmp may remove them
        self._speaks = True
        self._lock: IO[str] | None = None  # held for as long as this process lives

    def open(self, environment: dict[str, str]) -> None:
        """Makes the folder. Raises `OSError`."""
        os.umask(0o077)
        # Hosts may share /tmp: then one makes it and the others have it.
        self.folder.mkdir(exist_ok=True)
        if self.folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{self.folder} is another user's")
        name = f"keeper-{self.host}-{os.getpid()}"
        self._lock = (self.folder / f".{name}").open("w", encoding="utf-8")
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # before the file has the name by which others find it
        (self.folder / f".{name}").replace(self.folder / name)
        _remove_left(self.folder)
        aside = self.folder / f".environment-{self.host}-{os.getpid()}"
        aside.write_text(json.dumps(environment), encoding="utf-8")
        aside.replace(self.folder / "environment")
        try:
            (self.folder / f"speaks-{self.host}").touch(exist_ok=False)
        except FileExistsError:  # this host was named twice
            self._speaks = False

    def news(self) -> dict[str, Any]:
        """How many ranks run here, their newest heartbeats, the failed ones, and what ranks have printed since."""
        self._look()
        now = time.time()
        return {
            "running": len(self._ranks),
            "beats": list(self._beats(now)),
            # Ages and not times: the hosts' clocks may differ.
            "failed": [
                {"age": now - note["time"], **{key: note[key] for key in ("rank", "code")}, "host": self.host}
                for note in self._failed.values()
            ],
            "output": list(self._output()) if self._speaks else [],
        }

    def stop(self) -> int:
        """Asks the ranks to save and end, also those that start later; the number of those that run."""
        with suppress(FileNotFoundError):
            (self.folder / "stopped").touch()
        self._look()
        running = len(self._ranks)
        self.signal(signal.SIGTERM)
        return running

    def signal(self, number: int) -> None:
        """To every rank's own process."""
        for processes in self._ranks.values():
            with suppress(ProcessLookupError):
                os.kill(processes["child"], number)

    def end(self) -> None:
        """Ends every rank with all its children, and its parents on this host."""
        self._look()
        for processes in self._ranks.values():
            with suppress(ProcessLookupError):
                os.killpg(processes["child"], signal.SIGKILL)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and any(_lives(ranks["worker"]) for ranks in self._ranks.values()):
            time.sleep(0.01)
        for processes in self._ranks.values():
            for name in ("worker", "daemon"):
                if processes.get(name) and _lives(processes[name]):
                    with suppress(ProcessLookupError):
                        os.kill(processes[name], signal.SIGKILL)

    def remove(self) -> None:
        """The folder, with all that ranks still write."""
        for _ in range(2):
            shutil.rmtree(self.folder, ignore_errors=True)

    def running(self) -> bool:
        """Whether any rank runs here."""
        self._look()
        return bool(self._ranks)

    def _look(self) -> None:
        found = {note["rank"]: note for note in self._notes("running")}
        if not self.folder.exists():  # another host that shares it was first
            return
        self._ranks = found
        for note in self._notes("failed"):
            self._failed.setdefault(note["rank"], note)
        for rank, processes in list(self._ranks.items()):
            if _lives(processes["worker"]):
                continue
            del self._ranks[rank]
            with suppress(FileNotFoundError):  # it went in good order, just now
                (self.folder / f"running-{self.host}-{rank}").unlink()
                # Killed: nobody else ends what it started, or tells.
                self._failed.setdefault(rank, {"time": time.time(), "rank": rank, "code": 128 + signal.SIGKILL})
                with suppress(ProcessLookupError):
                    os.killpg(processes["child"], signal.SIGKILL)

    def _notes(self, kind: str) -> Iterator[dict[str, Any]]:
        for file in self.folder.glob(f"{kind}-{self.host}-*"):
            with suppress(OSError, ValueError):  # gone meanwhile, or cut off by a full disk
                yield json.loads(file.read_bytes())

    def _beats(self, now: float) -> Iterator[dict[str, Any]]:
        for file in self.folder.glob("beat-*"):
            with suppress(OSError, ValueError, KeyError):
                beat = json.loads(file.read_bytes())
                if beat["host"] == self.host:
                    yield {**beat, "age": now - beat["time"]}

    def _output(self) -> Iterator[dict[str, Any]]:
        """Whole lines, and what is left when a rank has ended."""
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


def _remove_left(own: Path) -> None:
    """What keepers of this user left that were killed, as when the host was: it holds the ranks' environment."""
    for folder in own.parent.glob("hvd-transformer-*"):
        with suppress(OSError), ExitStack() as locks:  # in use: not to be locked
            if folder.lstat().st_uid != os.geteuid():  # may hold anything, such as a pipe that is never opened
                continue
            keepers = list(folder.glob("keeper-*"))  # none yet where one is about to begin
            for keeper in keepers:
                fcntl.flock(locks.enter_context(keeper.open(encoding="utf-8")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if keepers:
                shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        if Path("/proc/self").exists():
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    """Keeps the folder; 1 where it cannot be made."""
    keeper = NodeAgent(Path(sys.argv[1]))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    try:
        with open(0, "rb", buffering=0, closefd=False) as orders:  # no byte more than this line: `select` sees the rest
            first = json.loads(orders.readline())
        keeper.open(first["environment"])
    except (OSError, ValueError) as error:
        print(f"{keeper.folder}: cannot be made: {error}", file=sys.stderr)
        return 1
    try:
        _say({"ready": True})
        _serve(keeper)
    except (BrokenPipeError, SystemExit):
        pass
    finally:
        _end(keeper)
    return 0


def _serve(keeper: NodeAgent) -> None:
    """Until the launcher says so, is gone or silent."""
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
                    _say({"stopping": keeper.stop()})
                elif order == "stacks":
                    keeper.signal(signal.SIGUSR1)
                elif order == "end":
                    news = keeper.news()
                    keeper.end()
                    _say({**news, "ended": True})
                    # Hosts may share the folder: the others look into it once more.
                    select.select([sys.stdin], [], [], _SAVE_SECONDS)
                    return
        news = keeper.news()
        ranks = news["running"], len(news["failed"])
        if ranks != before or news["output"] or time.monotonic() - said > _QUIET_SECONDS:
            _say(news)
            before, said = ranks, time.monotonic()


def _end(keeper: NodeAgent) -> None:
    """What still runs may save before it is killed."""
    keeper.stop()
    deadline = time.monotonic() + _SAVE_SECONDS
    while keeper.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    keeper.end()
    keeper.remove()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _leave(*_: object) -> None:
    raise SystemExit


if __name__ == "__main__":
    sys.exit(main())

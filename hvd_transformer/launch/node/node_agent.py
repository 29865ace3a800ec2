"""The process that runs on each host for as long as the launcher is connected, and is the parent of the ranks there.

    python -m hvd_transformer.launch.node.node_agent FOLDER

It creates the job's private folder on this host, whose name begins with FOLDER; the ranks put their heartbeats there.
It talks to the launcher in JSON, one object per line (`NodeAgent.obey`, `NodeAgent.news`). Over gloo it starts the
ranks that the launcher names; over MPI those whose `rank_runner.py`, started by MPI's own daemon, asks it to. When the
launcher exits, or is silent for a while, it ends every rank on its host.
"""

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any

from hvd_transformer.launch.limits import raise_open_files
from hvd_transformer.launch.node.agent_folder import AgentFolder
from hvd_transformer.launch.node.launcher_pipe import LauncherPipe
from hvd_transformer.launch.node.rank_child import RankChild
from hvd_transformer.launch.node.rank_runner import Runner
from hvd_transformer.launch.sigterm import unblock_sigterm

_SAFE_PATH = "PYTHONSAFEPATH"  # for the launcher's programs; a script that a task starts may import what is beside it
_NEWS_SECONDS = 1.0  # between two news if nothing happens: a sign of life, with heartbeats
_OUTPUT_SECONDS = 0.1  # for which output is gathered into one message
_SUSPENDED_SECONDS = 3.0  # a longer turn means that this process was suspended, as its ranks were: it does not count
_WOKEN_SECONDS = 2.0  # after that, for the ranks to write heartbeats
_SILENCE_SECONDS = 12.0  # without a word from the launcher, until it says how long
_SAVE_SECONDS = 5.0  # for ranks to save when the launcher is gone
_END_SECONDS = 2.0  # for killed ranks, and for their runners, to end
_OUTPUT_BYTES = 1 << 18  # after which a message is sent at once
_UNSENT_BYTES = 1 << 20
_LOOK_SECONDS = 0.01


class NodeAgent:
    """The ranks on this host, during one start of the job after the other."""

    def __init__(self, folder: AgentFolder) -> None:
        """Raises `OSError` if the folder cannot be used."""
        self._folder, self._host = folder, os.uname().nodename
        self._values: dict[str, str] = {}
        self._umask = -1  # this process's
        self._ranks: dict[int, RankChild] = {}
        self._runners: dict[int, Runner] = {}
        self._silence, self._save = _SILENCE_SECONDS, 0.0  # seconds: `TimeLimits`
        self._stopped = self._reads = True
        self._asked_to_leave = False
        self._leaves_until: float | None = None
        self._ended: list[RankChild] = []  # since the last news
        self._output: list[dict[str, Any]] = []  # since the last news
        self._news_due = self._beats_due = 0.0
        self._selector = selectors.DefaultSelector()
        self._launcher = LauncherPipe(self._selector, self.obey)
        self._launcher.say({"agent": True})
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder.socket))
        self._listener.listen(1024)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakes = woken, wake
        self._selector.register(woken, selectors.EVENT_READ, self._woken)

    def serve(self) -> None:
        """Send news and take orders until the launcher is gone or silent, or this host has been left."""
        while self._launcher.lives(self._silence) and not self._has_left():
            began = time.monotonic()
            self._turn(max(0.0, self._news_due - began))
            if (lasted := time.monotonic() - began) > _SUSPENDED_SECONDS:
                self._launcher.excuse(lasted)
                self._beats_due = time.monotonic() + _WOKEN_SECONDS
            if self._asked_to_leave and self._leaves_until is None:
                self._leave()
            if time.monotonic() >= self._news_due:
                self._launcher.say(self.news())

    def ask_to_leave(self) -> None:
        """This host is about to end: let the ranks save, tell the launcher, and end with the last rank."""
        self._asked_to_leave = True

    def obey(self, order: dict[str, Any]) -> None:
        """Take an order of the launcher: `do` and its arguments."""
        do = order.pop("do")
        if do == "begin":
            self._begin(**order)
            self._launcher.say({"ready": True})
        elif do == "start":
            self._start_all(**order)
        elif do == "stop":
            news = self.news()
            self._stop()
            self._launcher.say({"stopping": news["running"], **news})
        elif do == "stacks":
            self._signal(signal.SIGUSR1)
        elif do == "end":
            self._beats_due = 0.0
            news = self.news()
            self._end()
            self._launcher.say({"ended": True, **news})

    def news(self) -> dict[str, Any]:
        """What has happened since the last news, and once a second all heartbeats.

        Ages instead of times, as the hosts' clocks may differ.
        """
        self._reap()
        now = time.monotonic()
        beats: list[dict[str, Any]] = []
        if now >= self._beats_due:
            beats = [
                {**beat, "age": (self._ranks[beat["rank"]].ended or now) - beat["time"]}
                for beat in self._folder.beats(self._ranks)
            ]
            self._beats_due = now + _NEWS_SECONDS
        news = {
            "host": self._host,
            "running": self._num_running(),
            "beats": beats,
            "ranks_ended": [{"rank": rank.rank, "code": rank.code, "age": now - rank.ended} for rank in self._ended],
            "output": self._output,
        }
        self._ended, self._output = [], []
        self._news_due = now + _NEWS_SECONDS
        return news

    def close(self) -> None:
        """Let running ranks save, then kill them and remove the folder."""
        self._stop()
        deadline = time.monotonic() + _SAVE_SECONDS
        while self._num_running() and time.monotonic() < deadline:
            self._turn(0.05)
            self._output.clear()  # nobody reads it, but a rank must not wait
        self._end()
        self._folder.remove()

    def _begin(self, values: dict[str, str], umask: int, silence: float, save: float) -> None:
        """Prepare for a start of the job. `values`: environment variables for its ranks.

        `silence`: seconds without a word from the launcher, after which its host or the network is lost. `save`:
        seconds for ranks to save when this host is about to end.
        """
        self._end()
        self._silence, self._save = silence, save
        self._values, self._umask, self._stopped = values, umask, False
        self._folder.clear()

    def _start_all(
        self, command: list[str], cwd: str, environment: dict[str, str], ranks: list[dict[str, str]]
    ) -> None:
        for rank in ranks:
            self._start(int(rank["HOROVOD_RANK"]), command, cwd, {**os.environ, **environment, **rank})

    def _start(self, rank: int, command: list[str], cwd: str, environment: dict[str, str]) -> None:
        ours = {name: value for name, value in environment.items() if name != _SAFE_PATH}
        its_environment = {**ours, **self._values, "HVD_TRANSFORMER_FOLDER": str(self._folder.path)}
        child = self._ranks[rank] = RankChild(rank, command, cwd, its_environment, self._umask)
        if self._reads:
            self._watch(child)
        if self._stopped:  # asked to stop while the ranks were starting
            child.signal(signal.SIGTERM)
        self._news_due = 0.0

    def _stop(self) -> None:
        """Ask the ranks to save and exit, also those that start later."""
        self._stopped = True
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for child in self._ranks.values():
            child.signal(number)

    def _end(self) -> None:
        """Kill every rank with all its children, then what started them over MPI, and forget them."""
        killed = [rank for rank, child in self._ranks.items() if not child.ended]
        for rank in killed:
            self._ranks[rank].kill()
        deadline = time.monotonic() + _END_SECONDS
        while self._num_running() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            self._reap()
        for rank, runner in self._runners.items():
            runner.release(self._ranks[rank].code)
        left = [self._runners[rank] for rank in killed if rank in self._runners]
        while any(map(Runner.lives, left)) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        for runner in left:
            runner.kill()
        for runner in self._runners.values():
            self._selector.unregister(runner.connection)
            runner.connection.close()
        for child in self._ranks.values():
            self._unwatch(child)
        for forgotten in (self._ranks, self._runners, self._ended, self._output):
            forgotten.clear()

    def _leave(self) -> None:
        self._leaves_until = time.monotonic() + self._save
        self._stop()
        self._launcher.say({"leaving": True, **self.news()})

    def _has_left(self) -> bool:
        if self._leaves_until is None:
            return False
        if self._num_running() and time.monotonic() < self._leaves_until:
            return False
        self._launcher.say(self.news())  # how they ended
        return True

    def _num_running(self) -> int:
        return sum(not child.ended for child in self._ranks.values())

    def _turn(self, seconds: float) -> None:
        """Wait up to `seconds` for something to happen and handle it."""
        for key, _ in self._selector.select(seconds):
            if self._selector.get_map().get(key.fd) is key:  # else what happened before has closed it
                key.data()
        reads = self._launcher.unsent < _UNSENT_BYTES  # else the ranks wait: this process's memory does not grow
        if reads != self._reads:
            self._reads = reads
            for child in self._ranks.values():
                (self._watch if reads else self._unwatch)(child)

    def _woken(self) -> None:
        """A child has ended."""
        with suppress(BlockingIOError):
            self._wakes[0].recv(1 << 12)
        self._reap()

    def _reap(self) -> None:
        for rank, child in self._ranks.items():
            if child.ended or not child.reap():
                continue
            self._unwatch(child)
            self._output += child.read_rest()
            self._ended.append(child)
            self._news_due = 0.0
            # The first exit code would make mpirun kill ranks that may still be saving.
            if rank in self._runners and not self._stopped:
                self._runners[rank].release(child.code)

    def _watch(self, child: RankChild) -> None:
        for name, stream in child.streams.items():
            self._selector.register(stream, selectors.EVENT_READ, partial(self._read, child, name))

    def _unwatch(self, child: RankChild) -> None:
        for stream in child.streams.values():
            with suppress(KeyError):
                self._selector.unregister(stream)

    def _read(self, child: RankChild, name: str) -> None:
        stream = child.streams[name]
        self._output += child.read(name)
        if name not in child.streams:
            self._selector.unregister(stream)
        many = sum(len(said["text"]) for said in self._output) > _OUTPUT_BYTES
        self._news_due = min(self._news_due, time.monotonic() + (0.0 if many else _OUTPUT_SECONDS))

    def _accept(self) -> None:
        runner = Runner(self._listener.accept()[0])
        self._selector.register(runner.connection, selectors.EVENT_READ, partial(self._hear, runner))

    def _hear(self, runner: Runner) -> None:
        """Start the runner's rank, or end it with its runner."""
        for message in runner.read():
            if "command" in message:
                runner.rank, runner.daemon, runner.pid = message["rank"], message["daemon"], message["pid"]
                self._runners[runner.rank] = runner
                self._start(runner.rank, message["command"], message["cwd"], message["environment"])
            elif runner.rank in self._ranks:
                self._ranks[runner.rank].signal(signal.SIGTERM)
        if runner.gone:
            self._selector.unregister(runner.connection)
            runner.connection.close()
            if self._runners.pop(runner.rank, None) and not self._ranks[runner.rank].ended:
                self._ranks[runner.rank].kill()


def main() -> int:
    """Serve the launcher; return 1 if the folder cannot be created."""
    raise_open_files()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())  # until there may be ranks
    unblock_sigterm()
    try:
        folder = AgentFolder(sys.argv[1])
        agent = NodeAgent(folder)
    except OSError as error:
        print(f"{sys.argv[1]}: cannot be created: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: agent.ask_to_leave())  # the host or its container is about to end
    try:
        agent.serve()
    except SystemExit:
        pass
    finally:
        agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A job on real hosts, launched on h1, as a test of faults sees it: its ranks, its steps, what it leaves behind.

A step takes PACE_SECONDS, most of it asleep, so that a job is in mid-run however long a fault lasts. It has no last
step: `finish` stops it and lets it make a few more.
"""

import json
import os
import pty
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from conftest import BIN, rank_environment
from hosts import Hosts
from jobs import WORKERS, lines, steps, summary, tiny

PROGRAM = BIN / "hvd-transformer"
PACE_SECONDS = 0.05
LAST_STEPS = 10  # that `finish` adds
NOT_OF_A_JOB = re.compile(r"sshd|^ssh-agent|^mergerfs")


def settings(corpus: Path, run: Path, num_ranks: int, num_steps: int) -> list[str]:
    """The same step on any number of ranks, whatever the number of steps.

    Another number of ranks rounds otherwise; Adam's small epsilon makes whole updates of that where a gradient is zero,
    and after a hundred steps it is seen in the loss.
    """
    samples = max(96, 15 * num_ranks)
    return [
        *tiny(corpus), "task=paced:PacedTask", f"output_dir={run}", f"training.max_steps={num_steps}",
        "training.epochs=100000", "training.eval_every=1000000", f"training.global_batch_size={samples}",
        f"training.batch_size={-(-samples // num_ranks)}", "optimizer.lr_scaling=none", "optimizer.schedule=constant",
        "optimizer.eps=1e-4", "training.stall_seconds=5", "checkpoint.every_steps=5", "training.precision=fp64",
    ]  # fmt: skip


ENDLESS = 100_000  # steps


class Place(NamedTuple):
    """A run directory: its path on the hosts, and where this process sees that of rank 0's host."""

    run: Path
    seen: Path


class HostJob:
    """A job with `slots` ranks on each host, from construction to `close`; rank 0 runs on the second host.

    `how`: "plain"; "terminal", which its output goes to; "detached".
    """

    def __init__(
        self,
        hosts: Hosts,
        corpus: Path,
        place: Place,
        output: Path,
        rng: random.Random,
        how: str = "plain",
        slots: int = 1,
        backend: str = "gloo",
        more: Sequence[str] = (),
        options: Sequence[str | int] = (),
        num_steps: int = ENDLESS,
    ) -> None:
        self.hosts, self.corpus, self.place, self.rng, self.how = hosts, corpus, place, rng, how
        self.names = [*hosts.names[1:], "h1"]
        self.num_ranks = slots * len(self.names)
        where = ",".join(f"{host}:{slots}" for host in self.names)
        self._words = [
            PROGRAM, "launch", "-np", self.num_ranks, "-H", where, f"--{backend}", "--env", "MALLOC_ARENA_MAX",
            "--restarts", 99, "--min-np", slots, *options,
        ]  # fmt: skip
        self.hit = ""  # the host whose rank suffered last
        self._more = more
        self.output = output
        output.touch()
        self._read, self._log = 0, list[str]()
        self._launchers: list[int] = []
        self._terminal = Terminal(self.output) if how == "terminal" else None
        self.popen = self.launch(num_steps)

    def launch(self, num_steps: int = ENDLESS) -> subprocess.Popen[bytes]:
        """Starts it, or lets it go on."""
        detached = ["--detach"] if self.how == "detached" else []
        words = [*self._words, *detached, "--"]
        words += [*settings(self.corpus, self.place.run, self.num_ranks, num_steps), *self._more]
        environment = {**rank_environment(), "HOROVOD_TEST_PACE": str(PACE_SECONDS), "MALLOC_ARENA_MAX": "1"}
        with self.output.open("ab") as file:
            out = file if self._terminal is None else self._terminal.fileno
            self.popen = self.hosts.popen(
                "h1", list(map(str, words)), cwd=WORKERS, env=environment, stdout=out, stderr=out,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        if detached:
            assert self.popen.wait(120) == 0, self.text()
        self._launchers.append(self.launcher() if detached else self.popen.pid)
        return self.popen

    @property
    def terminal(self) -> "Terminal":
        """The one that it was launched on."""
        assert self._terminal is not None
        return self._terminal

    def launcher(self) -> int:
        """The process of the launcher that is at work."""
        if self.how != "detached":
            return self.popen.pid
        return int(json.loads((self.place.seen / ".launcher").read_text(encoding="utf-8"))["pid"])

    def lives(self) -> bool:
        """Whether its launcher runs."""
        return (
            self.popen.poll() is None if self.how != "detached" else self._launchers[-1] in self.hosts.processes("h1")
        )

    def text(self) -> str:
        """What the launcher has said, the log of its run directory where it has no screen."""
        file = self.output if self.how != "detached" else self.place.seen / "logs" / "launch.log"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def evidence(self) -> str:
        """What it has said, and the end of each rank's log."""
        logs = sorted((self.place.seen / "logs").glob("rank-*.log"))
        return "\n".join([self.text()[-5000:], *(f"{log.name}:\n{log.read_text()[-5000:]}" for log in logs)])

    def log(self) -> list[str]:
        """Rank 0's lines that say which step it made, and where it began."""
        with suppress(OSError), (self.place.seen / "logs" / "rank-000.log").open("rb") as file:
            file.seek(self._read)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self._log += [line for line in whole.decode().splitlines() if re.search(r" rank 0 of |, step \d+ of", line)]
        return self._log

    def step(self) -> int:
        """The newest step that rank 0 has made."""
        found = [re.search(r"step (\d+) of", line) for line in self.log()]
        return next((int(match[1]) for match in reversed(found) if match), 0)

    def starts(self) -> list[int]:
        """The number of ranks at each start."""
        return [int(match[1]) for line in self.log() if (match := re.search(r" rank 0 of (\d+) ", line))]

    def steps_since_start(self) -> list[int]:
        """The steps since the newest start."""
        log = self.log()
        start = max(at for at, line in enumerate(log) if " rank 0 of " in line)
        return [int(match[1]) for line in log[start:] if (match := re.search(r"step (\d+) of", line))]

    def ranks(self, host: str) -> list[int]:
        train = re.compile(rf"({re.escape(str(BIN))}/python\S* )?{re.escape(str(BIN))}/hvd-train ")
        return [pid for pid, line in self.hosts.processes(host).items() if train.match(line)]

    def wait(self, condition: Callable[[], object], seconds: float | None = None) -> None:
        """Until the condition is true, while its launcher runs."""
        seconds = seconds or 120 + 10 * self.num_ranks
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.lives(), self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.005)

    def checkpoint(self) -> int:
        """The newest whole checkpoint's step."""
        return max((int(path.name[5:]) for path in (self.place.seen / "checkpoints").glob("step-*")), default=0)

    def finish(self) -> int:
        """Stops it, and lets it make a few more steps to its end; returns the number of its last step."""
        stopped = self.hosts.run("h1", [PROGRAM, "stop", self.place.run], timeout=150)
        assert stopped.returncode == 0, stopped.stderr + self.text()
        assert self.popen.wait(30) == (0 if self.how == "detached" else 1), self.text()
        self.wait_gone()
        last = self.checkpoint() + LAST_STEPS
        self.how = "plain"
        assert self.launch(last).wait(300 + 10 * self.num_ranks) == 0, self.text()
        self.wait_gone()
        assert not self._folders()
        return last

    def wait_gone(self, seconds: float = 30) -> None:
        """Until no process of it is left on any host."""
        deadline = time.monotonic() + seconds
        while left := [line for host in self.hosts.names for line in self._processes(host)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def _processes(self, host: str) -> list[str]:
        return [line for line in self.hosts.processes(host).values() if line and not NOT_OF_A_JOB.search(line)]

    def _folders(self) -> set[Path]:
        """Private folders of its node agents. One that is killed with its host leaves its own to the next one there."""
        temporary = {Path(f"/proc/{self.hosts.keeper(host)}/root/tmp") for host in self.hosts.names}
        names = [f"hvd-transformer-{launcher}-*" for launcher in self._launchers]
        return {folder for place in temporary for name in names for folder in place.glob(name)}

    def close(self) -> None:
        """Ends the launcher, as a kill does, and waits until nothing is left."""
        if self.lives():
            with suppress(ProcessLookupError):
                os.kill(self._launchers[-1], signal.SIGKILL)
        self.popen.wait()
        if self._terminal is not None:
            self._terminal.close()
        self.wait_gone()


class Terminal:
    """A terminal with somebody who looks, and writes down what it shows."""

    def __init__(self, shown: Path) -> None:
        self._keyboard, self.fileno = pty.openpty()
        self._shown = shown
        threading.Thread(target=self._look, daemon=True).start()

    def press(self, key: bytes) -> None:
        os.write(self._keyboard, key)

    def close(self) -> None:
        os.close(self.fileno)

    def _look(self) -> None:
        with suppress(OSError), self._shown.open("ab", buffering=0) as file:  # closed at the other end
            while data := os.read(self._keyboard, 1 << 16):
                file.write(data)
        os.close(self._keyboard)


def assert_unbroken(job: HostJob, last: int, unbroken: Path, same_world: bool) -> None:
    """Each step was made and kept once, as if nothing had happened; and nobody holds the run directory."""
    run = job.place.seen
    assert [step for step, _ in steps(run, "loss")] == list(range(1, last + 1))
    assert steps(run, "samples") == steps(unbroken, "samples")[:last]
    assert summary(run)["status"] == "finished"
    found, wanted = ([loss for _, loss in steps(folder, "loss")][:last] for folder in (run, unbroken))
    if same_world:
        assert found == wanted
    else:
        worst = max(abs(loss - other) / other for loss, other in zip(found, wanted, strict=True))
        assert worst < 1e-5
    assert lines(run)[-1]["step"] == last
    left = [path.name for path in run.iterdir() if path.name.startswith((".lock", ".launcher"))]
    assert not left and not list((run / "checkpoints").glob(".*.tmp"))

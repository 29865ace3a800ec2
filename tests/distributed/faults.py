"""The faults that happen to jobs on real hosts: each lets one thing happen, and ends what does not end by itself."""

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import rank_environment
from host_job import PROGRAM, HostJob, Place
from hosts import Hosts
from jobs import WORKERS


class Fault:
    """One kind of fault. What its attributes say is what a job must make of it.

    `restarts`: the ranks start again; `shrinks`: with those of the other hosts, until the host is back; `first_heals`:
    no step ends before it is healed. `how` the job is launched: see `HostJob`.
    """

    restarts, shrinks, first_heals, how = True, False, False, "plain"

    def __str__(self) -> str:
        return type(self).__name__

    @contextmanager
    def place(self, hosts: Hosts, folder: Path) -> Iterator[Place]:
        """Prepares the hosts for a job, and cleans up after it."""
        yield Place(folder / "run", folder / "run")

    def inject(self, job: HostJob) -> None:
        raise NotImplementedError

    def heal(self, job: HostJob) -> None:
        """Ends it."""


class RankFault(Fault):
    """Something that happens to a rank: never twice in a row on the same host, which would be set aside."""

    def another_host(self, job: HostJob) -> str:
        job.hit = job.rng.choice([host for host in job.names if host != job.hit and job.ranks(host)])
        return job.hit


class KillRank(RankFault):
    def inject(self, job: HostJob) -> None:
        os.kill(job.rng.choice(sorted(job.ranks(self.another_host(job)))), signal.SIGKILL)


class KillRanksOfHost(RankFault):
    def inject(self, job: HostJob) -> None:
        for pid in job.ranks(self.another_host(job)):
            os.kill(pid, signal.SIGKILL)


class StopRank(RankFault):
    """SIGSTOP, as of a process that hangs in the kernel."""

    def inject(self, job: HostJob) -> None:
        os.kill(job.rng.choice(sorted(job.ranks(self.another_host(job)))), signal.SIGSTOP)


class KillLauncher(Fault):
    first_heals = True

    def inject(self, job: HostJob) -> None:
        job.popen.kill()
        job.popen.wait()

    def heal(self, job: HostJob) -> None:
        """The same command lets the job go on."""
        job.wait_gone()
        job.launch()


class LoseHost(Fault):
    """Everything on a host is killed, sshd too; others are told, as the network is there."""

    shrinks = True

    def __init__(self) -> None:
        self.host = ""

    def inject(self, job: HostJob) -> None:
        self.host = _other_host(job)
        job.hosts.kill_host(self.host)

    def heal(self, job: HostJob) -> None:
        job.hosts.start_host(self.host)


class CutLink(LoseHost):
    """Nobody is told, and what runs on the host goes on."""

    def inject(self, job: HostJob) -> None:
        self.host = _other_host(job)
        job.hosts.cut(self.host)

    def heal(self, job: HostJob) -> None:
        job.hosts.join(self.host)


class ReturnBroken(LoseHost):
    """A host is lost and comes back without its data, its mount of the run directory, or its Python, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._times = 0

    def inject(self, job: HostJob) -> None:
        super().inject(job)
        python = Path(sys.prefix)
        self._missing, self._said = [
            (job.corpus, f"data.source={job.corpus} is not there"),
            (job.place.run.parent, f"output_dir={job.place.run} is another folder there"),
            (python, str(python)),
        ][self._times % 3]
        self._times += 1
        self._on_host(job, ["mount", "-t", "tmpfs", "none", self._missing])
        job.hosts.start_host(self.host)

    def heal(self, job: HostJob) -> None:
        """After the launcher has looked at the host and said why it does not use it."""
        starts = len(job.starts())
        said = f"host {self.host}: "
        job.wait(
            lambda: any(said in line and self._said in line and "excluded for" in line for line in _lines(job)), 60
        )
        assert len(job.starts()) == starts, "it was taken in"
        self._on_host(job, ["umount", self._missing])

    def _on_host(self, job: HostJob, words: list[str | Path]) -> None:
        assert job.hosts.run(self.host, words, cwd="/").returncode == 0


class BlockTerminal(Fault):
    """Ctrl-S: the launcher's terminal takes nothing more. The job does not notice."""

    restarts, how = False, "terminal"

    def __init__(self, seconds: float = 20) -> None:
        self._seconds = seconds

    def inject(self, job: HostJob) -> None:
        self._until, self._step = time.monotonic() + self._seconds, job.step()
        job.terminal.press(b"\x13")

    def heal(self, job: HostJob) -> None:
        time.sleep(0.5)  # what was shown before is read
        shown = job.output.stat().st_size
        _sleep_until(self._until)
        assert job.output.stat().st_size == shown, "the terminal was not blocked"
        assert job.step() > self._step + self._seconds
        job.terminal.press(b"\x11")
        job.wait(lambda: job.output.stat().st_size > shown)


class FreezeStorage(Fault):
    """The storage of the run directory stands still, on all hosts: a file system whose server does not answer."""

    restarts, first_heals = False, True

    def __init__(self, seconds: float = 60) -> None:
        self._seconds = seconds

    @contextmanager
    def place(self, hosts: Hosts, folder: Path) -> Iterator[Place]:
        if shutil.which("mergerfs") is None:
            pytest.skip("needs the command mergerfs, a file system whose process can be stopped")
        if not Path("/dev/fuse").exists():
            pytest.skip("needs /dev/fuse")
        server, shared = hosts.folder / "server", hosts.folder / "shared"
        with ExitStack() as mounted:
            for made in (server, shared):
                made.mkdir()
                mounted.callback(shutil.rmtree, made)
            for host in hosts.names:
                result = hosts.run(host, ["mergerfs", server, shared])
                assert result.returncode == 0, result.stderr
                mounted.callback(hosts.run, host, ["umount", shared])
            yield Place(shared / folder.name, server / folder.name)

    def inject(self, job: HostJob) -> None:
        self._until = time.monotonic() + self._seconds
        self._signal(job, signal.SIGSTOP)

    def heal(self, job: HostJob) -> None:
        _sleep_until(self._until)
        self._signal(job, signal.SIGCONT)

    def _signal(self, job: HostJob, number: int) -> None:
        for host in job.hosts.names:
            for pid, line in job.hosts.processes(host).items():
                if line.startswith("mergerfs"):
                    os.kill(pid, number)


class KillDetachedLauncher(Fault):
    """The launcher of `--detach` is killed while somebody is attached, who is told; the next one can be attached to."""

    first_heals, how = True, "detached"

    def inject(self, job: HostJob) -> None:
        attached = self._attach(job)
        os.kill(job.launcher(), signal.SIGKILL)
        _, said = attached.communicate(timeout=30)
        assert attached.returncode == 2 and "its launcher was killed" in said

    def heal(self, job: HostJob) -> None:
        job.wait_gone()
        job.launch()
        attached = self._attach(job)
        os.kill(attached.pid, signal.SIGINT)
        _, said = attached.communicate(timeout=30)
        assert attached.returncode == 0 and "the job runs on" in said

    def _attach(self, job: HostJob) -> "subprocess.Popen[str]":
        """After it has shown a step."""
        words = [PROGRAM, "attach", job.place.run]
        attached = job.hosts.popen(
            "h1", words, env=rank_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )  # fmt: skip
        assert any("step" in attached.stdout.readline() for _ in range(100))
        return attached


class FillDisk(Fault):
    """The disks of rank 0's host are full for a while: /tmp, where heartbeats are, and that of the run directory."""

    restarts = False

    def __init__(self, seconds: float = 20) -> None:
        self._seconds = seconds

    @contextmanager
    def place(self, hosts: Hosts, folder: Path) -> Iterator[Place]:
        host, disk = hosts.names[1], hosts.folder / "disk"
        disk.mkdir()
        with hosts.own_tmp(host, "size=32m"):
            assert hosts.run(host, ["mount", "-t", "tmpfs", "-o", "size=32m", "none", disk]).returncode == 0
            try:
                yield Place(disk / folder.name, Path(f"/proc/{hosts.keeper(host)}/root{disk}") / folder.name)
            finally:
                hosts.run(host, ["umount", disk])
                shutil.rmtree(disk)

    def inject(self, job: HostJob) -> None:
        self._until, self._step = time.monotonic() + self._seconds, job.step()
        for folder in self._disks(job):
            filled = job.hosts.run(job.names[0], ["dd", "if=/dev/zero", f"of={folder}/filled", "bs=4k"])
            assert "No space left" in filled.stderr

    def heal(self, job: HostJob) -> None:
        _sleep_until(self._until)
        for folder in self._disks(job):
            job.hosts.run(job.names[0], ["rm", folder / "filled"])

    def _disks(self, job: HostJob) -> list[Path]:
        return [job.place.run.parent, Path("/tmp")]


class StepClock(Fault):
    """The clock of rank 0's host jumps by two minutes, forward and back in turn, as seen by all that runs there."""

    restarts = False

    def __init__(self, seconds: float = 15) -> None:
        self._seconds, self._ahead = seconds, 0

    @contextmanager
    def place(self, hosts: Hosts, folder: Path) -> Iterator[Place]:
        if (compiler := shutil.which("cc")) is None:
            pytest.skip("needs a C compiler, for a clock that can be set")
        host, library, self._file = hosts.names[1], folder / "wall_clock.so", folder / "clock"
        source = WORKERS / "wall_clock.c"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        self._set(0)
        hosts.kill_host(host)
        hosts.start_host(host, "-o", f"SetEnv=LD_PRELOAD={library} WALL_CLOCK={self._file}")
        try:
            yield Place(folder / "run", folder / "run")
        finally:
            hosts.kill_host(host)
            hosts.start_host(host)

    def inject(self, job: HostJob) -> None:
        self._until = time.monotonic() + self._seconds
        self._set(120 if self._ahead <= 0 else -120)

    def heal(self, job: HostJob) -> None:
        assert abs(self._skew(job) - self._ahead) < 5
        _sleep_until(self._until)

    def _set(self, ahead: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:  # it is mapped: never another one
            file.write(struct.pack("i", ahead))
        self._ahead = ahead

    def _skew(self, job: HostJob) -> float:
        words = ["ssh", job.names[0], f"{sys.executable} -c 'import time; print(time.time())'"]
        return float(job.hosts.run("h1", words).stdout) - time.time()


FAULTS = [
    KillRank, KillRanksOfHost, StopRank, KillLauncher, LoseHost, CutLink, ReturnBroken, BlockTerminal, FreezeStorage,
    KillDetachedLauncher, FillDisk, StepClock,
]  # fmt: skip


def _other_host(job: HostJob) -> str:
    """One with ranks that is not the launcher's."""
    return job.rng.choice([host for host in job.names[:-1] if job.ranks(host)])


def _lines(job: HostJob) -> list[str]:
    return job.text().splitlines()


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))

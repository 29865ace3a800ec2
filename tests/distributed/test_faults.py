"""Jobs on two real hosts that lose ranks, hosts, links and their launcher, and end as if nothing had happened.

The tests marked `slow` let every fault happen FAULT_REPEATS times (3), each at a random moment, and show how long it
stopped the job. FAULT_SLOTS=2 starts two ranks on each host; FAULT_SETTINGS="KEY=VALUE ..." sets more.
"""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import pytest
from conftest import BIN, rank_environment
from hosts import Hosts, no_space
from jobs import steps, summary, tiny, write_corpus
from worlds import Worlds

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

NUM_HOSTS = 2
REPEATS = int(os.environ.get("FAULT_REPEATS", "3"))
SLOTS = int(os.environ.get("FAULT_SLOTS", "1"))
MORE = os.environ.get("FAULT_SETTINGS", "").split()
STEPS_A_FAULT = 40
SERVER = re.compile(r"sshd|^ssh-agent")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=20_000)


def settings(corpus: Path, run: Path, num_steps: int) -> list[str]:
    return [
        *tiny(corpus), f"output_dir={run}", f"training.max_steps={num_steps}", "training.epochs=10000",
        "training.eval_every=100000", "training.global_batch_size=32", f"training.batch_size={16 // SLOTS}",
        "training.stall_seconds=5", "checkpoint.every_steps=5", "training.precision=fp64",
    ]  # fmt: skip


class Job:
    """A job launched on h1 that uses h2 and h1; rank 0 runs on h2."""

    def __init__(
        self, hosts: Hosts, corpus: Path, run: Path, num_steps: int, backend: str, more: Sequence[str] = ()
    ) -> None:
        self.hosts, self.run, self._rng = hosts, run, random.Random(f"{run.name} {num_steps}")
        self._command = [
            BIN / "hvd-transformer", "launch", "-np", 2 * SLOTS, "-H", f"h2:{SLOTS},h1:{SLOTS}", f"--{backend}",
            "--restarts", 5 + 2 * REPEATS, "--min-np", SLOTS, "--", *settings(corpus, run, num_steps), *more,
        ]  # fmt: skip
        self._output = run.with_suffix(".out")
        self._read, self._log = 0, list[str]()
        self.launch()

    def launch(self) -> None:
        """Starts it, or lets it go on."""
        with self._output.open("ab") as file:
            self.popen = self.hosts.popen(
                "h1", list(map(str, self._command)), env=rank_environment(), stdout=file, stderr=file,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        return self._output.read_text(encoding="utf-8")

    def log(self) -> list[str]:
        """Rank 0's lines that say which step it made, and where it began."""
        with suppress(OSError), (self.run / "logs" / "rank-000.log").open("rb") as file:
            file.seek(self._read)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self._log += [line for line in whole.decode().splitlines() if re.search(r" rank 0 of |, step \d+ of", line)]
        return self._log

    def starts(self) -> int:
        return sum(" rank 0 of " in line for line in self.log())

    def ranks(self, host: str) -> list[int]:
        train = re.compile(rf"({re.escape(str(BIN))}/python\S* )?{re.escape(str(BIN))}/hvd-train ")
        return [pid for pid, line in self.hosts.processes(host).items() if train.match(line)]

    def wait(self, condition: Callable[[], object], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.popen.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.005)

    def checkpoint(self) -> int:
        """The newest whole checkpoint's step."""
        return max((int(path.name[5:]) for path in (self.run / "checkpoints").glob("step-*")), default=0)

    def suffer(self, fault: Callable[["Job"], None], at_step: int) -> float:
        """Lets it happen a random moment after a step, and waits for the next step: after how many seconds."""
        self.wait(lambda: newest_step(self.log()) >= at_step)
        time.sleep(self._rng.uniform(0, 0.3))
        begun, saved, before = time.monotonic(), self.checkpoint(), len(self.log())
        fault(self)
        if self.popen.poll() is not None:  # the launcher itself
            self.wait_gone()
            self.launch()

        def goes_on() -> bool:
            new = self.log()[before:]
            starts = [at for at, line in enumerate(new) if " rank 0 of " in line]
            return bool(starts) and any(" step " in line for line in new[starts[-1] :])

        self.wait(goes_on)
        assert newest_step(steps_since_start(self.log())[:1]) > saved, "a step before the last checkpoint was repeated"
        return time.monotonic() - begun

    def one_of(self, pids: list[int]) -> int:
        return self._rng.choice(sorted(pids))

    def wait_gone(self) -> None:
        """Until no process of it is left on any host."""
        deadline = time.monotonic() + 30
        while left := [line for host in self.hosts.names for line in self.left(host)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def left(self, host: str) -> list[str]:
        return [line for line in self.hosts.processes(host).values() if line and not SERVER.search(line)]


def newest_step(log: list[str]) -> int:
    found = [re.search(r"step (\d+) of", line) for line in log]
    return next((int(match[1]) for match in reversed(found) if match), 0)


def steps_since_start(log: list[str]) -> list[str]:
    """The lines of the steps since the newest start."""
    start = max(at for at, line in enumerate(log) if " rank 0 of " in line)
    return [line for line in log[start:] if " step " in line]


def kill_rank(job: Job) -> None:
    os.kill(job.one_of(job.ranks("h1") + job.ranks("h2")), signal.SIGKILL)


def kill_ranks_of_a_host(job: Job) -> None:
    for pid in job.ranks("h2"):
        os.kill(pid, signal.SIGKILL)


def stop_rank(job: Job) -> None:
    os.kill(job.one_of(job.ranks("h1") + job.ranks("h2")), signal.SIGSTOP)


def kill_launcher(job: Job) -> None:
    job.popen.kill()
    job.popen.wait()


def kill_host(job: Job) -> None:
    job.hosts.kill_host("h2")


def cut_link(job: Job) -> None:
    job.hosts.cut("h2")


@contextmanager
def started(
    hosts: Hosts, corpus: Path, run: Path, num_steps: int, backend: str = "gloo", more: Sequence[str] = ()
) -> Iterator[Job]:
    job = Job(hosts, corpus, run, num_steps, backend, more)
    try:
        yield job
    finally:
        if job.popen.poll() is None:
            job.popen.kill()
        job.popen.wait()
        hosts.join("h2")
        if not hosts.processes("h2"):
            hosts.start_host("h2")
        job.wait_gone()


def ends_as_unbroken(job: Job, unbroken: Path, num_steps: int) -> None:
    assert job.popen.wait(120) == 0, job.text()
    assert [step for step, _ in steps(job.run, "loss")] == list(range(1, num_steps + 1))
    assert steps(job.run, "samples") == steps(unbroken, "samples")[:num_steps]
    assert summary(job.run)["status"] == "finished"
    found, wanted = ([loss for _, loss in steps(run, "loss")][:num_steps] for run in (job.run, unbroken))
    assert found == pytest.approx(wanted, rel=1e-6, abs=0)


@pytest.fixture(scope="module")
def unbroken(world: Worlds, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The run of so many steps to which nothing happens."""
    made: dict[int, Path] = {}

    def make(num_steps: int, *more: str) -> Path:
        if num_steps not in made:
            made[num_steps] = tmp_path_factory.mktemp("unbroken") / "run"
            world(2 * SLOTS).train([*settings(corpus, made[num_steps], num_steps), *more], timeout=600)
        return made[num_steps]

    return make


@pytest.mark.parametrize(
    ("backend", "same_size", "last", "more"),
    [
        ("gloo", [kill_rank, stop_rank], cut_link, ["parallel.optimizer_shard=state"]),  # both ranks write checkpoints
        pytest.param("mpi", [kill_ranks_of_a_host, kill_launcher], kill_host, [], marks=[no_space, pytest.mark.slow]),
    ],
)
def test_faults_change_nothing(
    hosts: Hosts,
    corpus: Path,
    unbroken: Callable[..., Path],
    tmp_path: Path,
    backend: str,
    same_size: list[Callable[[Job], None]],
    last: Callable[[Job], None],
    more: list[str],
) -> None:
    """Also with the last one, which changes the number of ranks and so the order of the sums."""
    faults = [*same_size, last]
    num_steps = (1 + len(faults)) * STEPS_A_FAULT
    with started(hosts, corpus, tmp_path / "run", num_steps, backend, more) as job:
        for number, fault in enumerate(faults):
            seconds = job.suffer(fault, 5 + number * STEPS_A_FAULT)
            print(f"{backend}, {fault.__name__}: {seconds:.1f} s to the next step")
        ends_as_unbroken(job, unbroken(num_steps), num_steps)
    assert summary(tmp_path / "run")["world"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=no_space)])
@pytest.mark.parametrize("fault", [kill_rank, kill_ranks_of_a_host, stop_rank, kill_launcher])
def test_a_fault_many_times(
    hosts: Hosts,
    corpus: Path,
    unbroken: Callable[..., Path],
    tmp_path: Path,
    backend: str,
    fault: Callable[[Job], None],
) -> None:
    num_steps, rng, seconds = (1 + REPEATS) * STEPS_A_FAULT, random.Random(fault.__name__), []
    with started(hosts, corpus, tmp_path / "run", num_steps, backend, MORE) as job:
        for number in range(REPEATS):
            seconds.append(job.suffer(fault, number * STEPS_A_FAULT + rng.randrange(3, STEPS_A_FAULT - 3)))
        ends_as_unbroken(job, unbroken(num_steps), num_steps)
    report(backend, fault, seconds)


# A step takes long enough that the job does not end before the host is back. Another number of ranks rounds otherwise;
# Adam's small epsilon makes whole updates of that where a gradient is zero, and in 100 steps it is seen in the loss.
SLOW = ["model.d_model=64", "model.d_feedforward=256", "data.sequence_length=64", "optimizer.eps=1e-4"]
SLOW_STEPS = 300


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=no_space)])
@pytest.mark.parametrize("fault", [kill_host, cut_link])
def test_a_host_goes_and_comes_back_many_times(
    hosts: Hosts,
    corpus: Path,
    unbroken: Callable[..., Path],
    tmp_path: Path,
    backend: str,
    fault: Callable[[Job], None],
) -> None:
    """Each time in a job of its own: a host that is lost again and again is left alone for longer."""
    rng, seconds = random.Random(fault.__name__), []
    for number in range(REPEATS):
        with started(hosts, corpus, tmp_path / f"run-{number}", SLOW_STEPS, backend, SLOW) as job:
            seconds.append(job.suffer(fault, rng.randrange(3, 30)))
            starts = job.starts()
            if fault is kill_host:
                hosts.start_host("h2")
            else:
                hosts.join("h2")
            job.wait(lambda job=job, starts=starts: job.starts() > starts)  # it is taken in
            ends_as_unbroken(job, unbroken(SLOW_STEPS, *SLOW), SLOW_STEPS)
    report(backend, fault, seconds)


def report(backend: str, fault: Callable[[Job], None], seconds: list[float]) -> None:
    print(f"{backend}, {fault.__name__}: median {median(seconds):.1f} s, at most {max(seconds):.1f} s to the next step")

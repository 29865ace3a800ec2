"""Jobs on real hosts that lose ranks, hosts, links, disks and their launcher, and end as if nothing had happened.

The tests marked `slow` let every fault happen FAULT_REPEATS times (5) at random moments (FAULT_SEED=19), on two hosts
and on four, and show how long it stopped the job. FAULT_SLOTS=2 starts two ranks on each host, and
FAULT_SETTINGS="KEY=VALUE ..." sets more. MANY_RANKS=1 also lets six of them happen to 64 ranks on 16 hosts, which takes
16 GB of memory.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from faults import FAULTS, CutLink, Fault, KillLauncher, KillRank, KillRanksOfHost, LoseHost, StepClock, StopRank
from host_job import PACE_SECONDS, HostJob, assert_unbroken, settings
from hosts import Hosts, missing, no_space
from jobs import WORKERS, write_corpus
from worlds import Worlds

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

REPEATS = int(os.environ.get("FAULT_REPEATS", "5"))
SEED = int(os.environ.get("FAULT_SEED", "19"))
SLOTS = int(os.environ.get("FAULT_SLOTS", "1"))
MORE = os.environ.get("FAULT_SETTINGS", "").split()
STEPS_BETWEEN = 20  # two faults

Unbroken = Callable[[int, int], Path]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with made(2) as hosts:
        yield hosts


@pytest.fixture(scope="module", params=[2, 4], ids=["two hosts", "four hosts"])
def several_hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with made(request.param) as hosts:
        yield hosts


@contextmanager
def made(number: int) -> Iterator[Hosts]:
    """Hosts with a corpus in their folder, which all of them see even with a /tmp of their own."""
    if reason := missing():
        pytest.skip(reason)
    with Hosts(number) as hosts:
        write_corpus(hosts.folder / "text", train=20_000)
        (hosts.folder / "runs").mkdir()
        yield hosts


@pytest.fixture(scope="module")
def unbroken(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The run of so many ranks and at least so many steps to which nothing happens."""
    runs: dict[int, tuple[int, Path]] = {}
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=20_000)

    def make(num_ranks: int, num_steps: int) -> Path:
        if runs.get(num_ranks, (0, corpus))[0] < num_steps:
            run, num_steps = tmp_path_factory.mktemp("unbroken") / "run", num_steps + 200
            words = [*settings(corpus, run, num_ranks, num_steps), "checkpoint.every_steps=none", *MORE]
            done = world(min(num_ranks, 4)).command("hvd-train", *words, folder=WORKERS, timeout=900)
            assert done.returncode == 0, done.stdout + done.stderr
            runs[num_ranks] = num_steps, run
        return runs[num_ranks][1]

    return make


@pytest.fixture(scope="module")
def undisturbed(several_hosts: Hosts) -> Callable[[int], Path]:
    """The same on these hosts: four ranks of one host add in another order, in its memory, and have fewer threads."""
    runs = list[tuple[int, Path]]()

    def make(num_steps: int) -> Path:
        if not runs or runs[-1][0] < num_steps:
            fault, name, length = Fault(), f"undisturbed-{num_steps}", num_steps + 200
            with started(several_hosts, fault, name, random.Random(SEED), num_steps=length) as job:
                assert job.popen.wait(600) == 0, job.text()
                runs.append((length, job.place.seen))
        return runs[-1][1]

    return make


@contextmanager
def started(
    hosts: Hosts, fault: Fault, name: str, rng: random.Random, slots: int = SLOTS, more: Sequence[str] = (),
    **others: Any,
) -> Iterator[HostJob]:  # fmt: skip
    """A job to which the fault will happen; nothing of it is left afterwards on hosts that are as they were."""
    folder = hosts.folder / "runs" / name
    folder.mkdir()
    with fault.place(hosts, folder) as place:
        job = HostJob(
            hosts, hosts.folder / "text", place, folder / "output", rng, fault.how, slots, more=[*MORE, *more], **others
        )
        try:
            yield job
        except BaseException:
            print(job.evidence())
            raise
        finally:
            for host in hosts.names:
                hosts.join(host)
            job.close()
            for host in hosts.names:
                if not hosts.processes(host):
                    hosts.start_host(host)


def suffer(job: HostJob, fault: Fault, after_steps: int) -> float:
    """Lets it happen a random moment after so many more steps, and heals it: the seconds until the next step."""
    begin = job.step() + after_steps
    job.wait(lambda: job.step() >= begin)
    time.sleep(job.rng.uniform(0, 6 * PACE_SECONDS))
    saved, starts, began = job.checkpoint(), len(job.starts()), time.monotonic()
    fault.inject(job)
    before, shown = len(job.log()), job.text().count("\nstep ")
    if fault.first_heals:
        fault.heal(job)
    if fault.restarts:
        job.wait(lambda: len(job.starts()) > starts and job.steps_since_start())
    else:  # the disk may be full on which the log is
        job.wait(lambda: any(" step " in line for line in job.log()[before:]) or job.text().count("\nstep ") > shown)
    seconds = time.monotonic() - began
    if not fault.first_heals and not fault.shrinks:
        fault.heal(job)
    if fault.restarts:
        assert len(job.starts()) == starts + 1
        assert job.steps_since_start()[0] > saved, "a step before the last checkpoint was repeated"
    else:
        assert len(job.starts()) == starts, job.text()
    return seconds


def come_back(job: HostJob, fault: Fault) -> None:
    """Heals a host, and waits until the job has taken it in."""
    assert job.starts()[-1] < job.num_ranks
    fault.heal(job)
    job.wait(lambda: job.starts()[-1] == job.num_ranks and len(job.steps_since_start()) > STEPS_BETWEEN)


def report(fault: Fault, hosts: Hosts, seconds: Sequence[float], what: str = "") -> None:
    times = f"median {median(seconds):.1f} s, at most {max(seconds):.1f} s, {len(seconds)} times (FAULT_SEED={SEED})"
    print(f"\n{fault}{what}, {len(hosts.names)} hosts: to the next step {times}")


def test_faults_change_nothing(two_hosts: Hosts, unbroken: Unbroken) -> None:
    """One job, several faults; the last one changes the number of ranks and so the order of the sums."""
    rng, clock, cut = random.Random(SEED), StepClock(seconds=1), CutLink()
    # Both ranks write checkpoints.
    with started(two_hosts, clock, "several", rng, more=["parallel.optimizer_shard=state"]) as job:
        for each in (KillRank(), clock, StopRank(), cut):
            print(f"{each}: {suffer(job, each, rng.randrange(3, STEPS_BETWEEN)):.1f} s to the next step")
        cut.heal(job)
        last = job.finish()
        assert_unbroken(job, last, unbroken(job.num_ranks, last), same_world=False)


def test_a_dead_host_does_not_keep_the_others(two_hosts: Hosts) -> None:
    """Which cannot go on without it. The limit counts from the failure."""
    fault, limits = LoseHost(), ["--restarts", 3, "--min-np", 2, "--give-up-after", "5s"]
    with started(two_hosts, fault, "dead", random.Random(SEED), slots=1, options=limits) as job:
        job.wait(lambda: job.step() > 5)
        began = time.monotonic()
        fault.inject(job)
        code = job.popen.wait(60)
        print(f"ended {time.monotonic() - began:.1f} s after the loss, exit code {code}")
        assert time.monotonic() - began < 5 + 20  # a search for the host may take six, and a restart
        assert code != 0
        job.wait_gone(5)
        assert "giving up: no new step for 5 s after a failure (--give-up-after)" in job.text()
        ended = json.loads((job.place.seen / "exit.json").read_text())
        assert ended["code"] == code and "host h2 is lost" in ended["cause"]


@pytest.mark.slow
def test_a_host_that_is_lost_again_and_again_uses_up_the_restarts(two_hosts: Hosts) -> None:
    fault = LoseHost()
    limits = ["--restarts", 3, "--min-np", 1]
    with started(two_hosts, fault, "again", random.Random(SEED), slots=1, options=limits) as job:
        for number in range(4):
            job.wait(lambda: job.starts()[-1:] == [2] and len(job.steps_since_start()) > 5, 180)
            fault.inject(job)
            if number < 3:
                job.wait(lambda: job.starts()[-1] == 1 and job.steps_since_start())
                fault.heal(job)
        assert job.popen.wait(60) != 0
        job.wait_gone(5)
        assert "giving up after 3 restarts" in job.text()
        assert job.starts() == [2, 1, 2, 1, 2, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_fault_many_times_over_gloo(
    several_hosts: Hosts, unbroken: Unbroken, undisturbed: Callable[[int], Path], kind: type[Fault]
) -> None:
    """In one job; each loss of a host in a job of its own, as a host that is lost again is left alone for longer."""
    hosts, fault = several_hosts, kind()
    rng, seconds = random.Random(f"{SEED} {fault} {len(hosts.names)}"), list[float]()
    for number in range(REPEATS if fault.shrinks else 1):
        with started(hosts, fault, f"{fault}-{number}", rng) as job:
            for _ in range(1 if fault.shrinks else REPEATS):
                seconds.append(suffer(job, fault, rng.randrange(3, STEPS_BETWEEN)))
            if fault.shrinks:
                come_back(job, fault)
            last = job.finish()
            wanted = unbroken(job.num_ranks, last) if fault.shrinks else undisturbed(last)
            assert_unbroken(job, last, wanted, same_world=not fault.shrinks)
    report(fault, hosts, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KillRank, KillRanksOfHost, StopRank, KillLauncher, LoseHost, CutLink])
@no_space
def test_a_fault_over_mpi(two_hosts: Hosts, unbroken: Unbroken, kind: type[Fault]) -> None:
    rng, fault = random.Random(f"{SEED} {kind.__name__}"), kind()
    with started(two_hosts, fault, f"mpi-{fault}", rng, backend="mpi") as job:
        seconds = suffer(job, fault, rng.randrange(3, STEPS_BETWEEN))
        if fault.shrinks:
            come_back(job, fault)
        last = job.finish()
        assert_unbroken(job, last, unbroken(job.num_ranks, last), same_world=False)
    report(fault, two_hosts, [seconds], " over MPI")


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("MANY_RANKS") != "1", reason="needs MANY_RANKS=1 and 16 GB of memory")
def test_faults_of_64_ranks(unbroken: Unbroken) -> None:
    """On 16 hosts: two cores take minutes for each start."""
    rng = random.Random(SEED)
    with made(16) as hosts:
        more = ["training.stall_seconds=60", "checkpoint.every_steps=1"]
        with started(hosts, KillRank(), "many", rng, slots=4, more=more) as job:
            for fault in (KillRank(), KillRanksOfHost(), StopRank(), KillLauncher(), LoseHost(), CutLink()):
                report(fault, hosts, [suffer(job, fault, rng.randrange(1, 3))], " of 64 ranks")
                if fault.shrinks:
                    fault.heal(job)
            last = job.finish()
            assert_unbroken(job, last, unbroken(job.num_ranks, last), same_world=False)

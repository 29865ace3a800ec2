"""The service's scheduler: the time of a pass, and days of a simulated cluster under it.

    python -m benchmarks.scheduler                   everything, about five minutes
    python -m benchmarks.scheduler --only passes
    python -m benchmarks.scheduler --hours 24 --seeds 1

Passes: 10,000 jobs of thousands of sizes wait on 100 hosts with 8 slots and 8 GPUs each.

Days: 20 hosts with 8 slots and more work than they can do. Jobs have 1 to 64 ranks and log-normal run times (median 30
minutes, at most 12 hours), and once a day one needs every slot for half an hour. Half of the jobs are in arrays of 2 to
20, whose run times differ by a log-normal factor of 0.2. The same days under the same scheduler with different
knowledge of run times: the truth; live speed, and of waiting jobs their lengths, time limits up to three times too
long, what the service has seen of their array and of all jobs before, or nothing.

Shares: three owners with jobs of different sizes, one of whom submits 1,000 at once.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import click

from benchmarks.machine import machine
from benchmarks.simulated_cluster import TRUTH, Knowledge, Report, SimulatedCluster, Work
from hvd_transformer.atomic import write_text
from hvd_transformer.service.jobs import Host, Needs, Placement
from hvd_transformer.service.scheduling.scheduler import schedule
from hvd_transformer.service.scheduling.snapshot import Running, Snapshot, Waiting

HOUR, DAY = 3_600.0, 86_400.0
PASS_SECONDS, UTILISATION, SHARE = 0.1, 0.95, 0.05  # wanted
HOSTS = [Host(f"h{number}", 8) for number in range(20)]
SLOTS = sum(host.slots for host in HOSTS)
WARM_UP = 6 * HOUR
RUNNING_ONLY = "live speed, and lengths of waiting jobs"
SERVICE = "live speed, and what the service has seen before"
KNOWN = {
    RUNNING_ONLY: Knowledge(limited=1.0, limit=1.0),
    SERVICE: Knowledge(kinds=True, recent=True),
    "the same, and time limits of half": Knowledge(limited=0.5, kinds=True, recent=True),
    "the same, but no two jobs are alike": Knowledge(recent=True),
    "nothing of waiting jobs": Knowledge(),
}
Verdict = tuple[str, bool | None]  # None: nothing is wanted


def crowd(occupied: float, num_waiting: int = 10_000, num_hosts: int = 100, seed: int = 0) -> Snapshot:
    """Jobs of ten owners, six priorities and thousands of sizes; `occupied`: the share of slots in use."""
    chance = random.Random(seed)
    now, running = 1e6, []
    for host in range(num_hosts):
        for slot in range(8):
            if chance.random() < occupied:
                end = now + chance.uniform(0, DAY) if chance.random() < 0.8 else None
                place = (Placement(f"h{host}", 1, (slot,)),)
                began = now - chance.uniform(0, DAY)
                priority = chance.randrange(3)
                owner = f"user{chance.randrange(10)}"
                running.append(Running(len(running), owner, priority, Needs(1, 1, 1, 1), place, began, end))
    waiting = [
        Waiting(
            10_000 + number,
            f"user{chance.randrange(10)}",
            chance.randrange(6),
            now - chance.uniform(0, DAY),
            _any_needs(chance, num_hosts),
            chance.choice([None, chance.uniform(60, DAY)]),
        )
        for number in range(num_waiting)
    ]
    hosts = [Host(f"h{host}", 8, tuple(range(8))) for host in range(num_hosts)]
    usage = {f"user{number}": chance.uniform(0, 1e7) for number in range(10)}
    return Snapshot(now, hosts, waiting, running, usage, median_seconds=HOUR)


def _any_needs(chance: random.Random, num_hosts: int) -> Needs:
    tensor = chance.choice([1, 1, 2, 4, 8])
    ranks = tensor * chance.randint(1, min(100, num_hosts) // tensor)
    least = ranks if chance.random() < 0.8 else tensor
    return Needs(ranks, least, tensor, chance.choice([0, 1]))


def passes(rounds: int = 7) -> dict[str, list[float]]:
    """CPU seconds of each pass, which does nothing but compute."""
    single = crowd(0.0)
    ranks = [Waiting(job.id, job.owner, 0, job.submitted, Needs(1, 1, 1, 1)) for job in single.waiting]
    snapshots = {
        "800 of 10,000 start": replace(single, waiting=ranks),
        "hosts are free": single,
        "hosts are full": crowd(1.0),
        "one slot in ten is free": crowd(0.9),
    }
    figures: dict[str, list[float]] = {name: [] for name in snapshots}
    for _ in range(rounds):
        for name, snapshot in snapshots.items():
            began = time.process_time()
            schedule(snapshot)
            figures[name].append(time.process_time() - began)
    return figures


def mixed_work(hours: float, seed: int, whole_cluster: bool) -> list[Work]:
    """Half of the jobs are in arrays; always a backlog of three hours and a sixth more than the hosts can do."""
    chance = random.Random(seed)
    sizes, weights = (1, 2, 4, 8, 16, 32, 64), (40, 20, 15, 10, 8, 4, 3)
    works: list[Work] = []
    offered = now = 0.0
    while now < hours * HOUR:
        (ranks,) = chance.choices(sizes, weights)
        length = 0.5 * HOUR * math.exp(chance.gauss(0.0, 1.2))
        owner = f"user{chance.randrange(5)}"
        kind, is_array = len(works), chance.random() < 1 / 12  # an array has 11 jobs on average
        for _ in range(chance.randint(2, 20) if is_array else 1):
            seconds = min(12 * HOUR, length * math.exp(chance.gauss(0.0, 0.2)))
            works.append(Work(len(works), owner, now, seconds, Needs(ranks, ranks), kind=kind))
            offered += seconds * ranks
        now = max(0.0, offered / SLOTS - 3 * HOUR) / 1.15
    if whole_cluster:
        for number in range(int(hours / 24) or 1):
            submitted = HOUR + number * DAY
            works.append(Work(len(works), f"user{number % 5}", submitted, 0.5 * HOUR, Needs(SLOTS, SLOTS)))
    return works


def utilisation(report: Report, hours: float) -> float:
    return sum(report.busy.values()) / (SLOTS * (hours * HOUR - WARM_UP))


def days(hours: float, seeds: int, whole_cluster: bool, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Utilisation of each seed by what is known, and "longest wait": hours that a job for all slots waited."""
    figures: dict[str, list[float]] = {name: [] for name in ("truth", *KNOWN, "longest wait")}
    for seed in range(seeds):
        works = mixed_work(hours, seed, whole_cluster)
        for name, knowledge in {"truth": TRUTH, **KNOWN}.items():
            report = SimulatedCluster(HOSTS, works, knowledge, seed).run(hours * HOUR, WARM_UP)
            figures[name].append(utilisation(report, hours))
            for work in works:
                if work.needs.num_ranks == SLOTS:
                    start, _ = report.jobs[work.id]
                    figures["longest wait"].append(((hours * HOUR if start is None else start) - work.submitted) / HOUR)
            say(f"seed {seed}, {name}: {figures[name][-1]:.3f}")
    return figures


def shares(hours: float = 24.0) -> dict[str, float]:
    """What each of three owners has used, relative to an equal share."""
    chance = random.Random(0)
    kinds = {"many": (1, 1_000), "medium": (8, 0), "large": (40, 0)}  # ranks; jobs at the first second
    works: list[Work] = []
    for owner, (ranks, at_once) in kinds.items():
        offered = 0.0
        while offered < hours * HOUR * SLOTS / 2:
            seconds = min(12 * HOUR, 0.5 * HOUR * math.exp(chance.gauss(0.0, 1.0)))
            submitted = 0.0 if len(works) < at_once else max(0.0, offered / (SLOTS / 2) - 3 * HOUR)
            works.append(Work(len(works), owner, submitted, seconds, Needs(ranks, ranks)))
            offered += seconds * ranks
    busy = SimulatedCluster(HOSTS, works, Knowledge()).run(hours * HOUR).busy
    return {owner: used / (sum(busy.values()) / len(kinds)) for owner, used in busy.items()}


@click.command()
@click.option("--only", type=click.Choice(["passes", "days", "shares"]), help="Measure this alone.")
@click.option("--hours", default=54.0, show_default=True, type=click.FloatRange(min=12), help="Of the simulated days.")
@click.option("--seeds", default=4, show_default=True, type=click.IntRange(min=1), help="Simulated days of each kind.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(only: str | None, hours: float, seeds: int, json_file: Path | None) -> None:
    """Exit code 1 where a pass takes longer than 100 ms, utilisation is below 95 % of the same with true ends of
    running jobs, or a share is more than 5 % from an equal one."""
    figures: dict[str, Mapping[str, object]] = {}
    verdicts: list[Verdict] = []
    if only in (None, "passes"):
        figures["passes"] = seconds = passes()
        for name, values in seconds.items():
            text = f"pass, {name}: median {median(values) * 1e3:.0f} ms, most {max(values) * 1e3:.0f} ms"
            verdicts.append((text, median(values) <= PASS_SECONDS))
    if only in (None, "days"):
        for kind, whole_cluster in (("mixed jobs", False), ("and a job for all slots a day", True)):
            figures[kind] = found = days(hours, seeds, whole_cluster, lambda text: click.echo(text, err=True))
            verdicts += _day_verdicts(kind, found)
    if only in (None, "shares"):
        figures["shares"] = used = shares()
        worst = max(abs(share - 1.0) for share in used.values())
        text = ", ".join(f"{owner} {share:.3f}" for owner, share in used.items())
        verdicts.append((f"shares of a day relative to an equal one: {text}", worst <= SHARE))
    words = {True: ": met", False: ": MISSED", None: ""}
    click.echo("\n".join(f"{text}{words[met]}" for text, met in verdicts))
    click.echo(machine())
    if json_file is not None:
        write_text(json_file, json.dumps({"machine": machine(), "figures": figures}, indent=1) + "\n")
    sys.exit(any(met is False for _, met in verdicts))


def _day_verdicts(kind: str, found: Mapping[str, Sequence[float]]) -> list[Verdict]:
    """What is wanted is wanted of live speed; the other lines show what time limits are worth."""
    verdicts = []
    for name in KNOWN:
        ratios = [own / truth for own, truth in zip(found[name], found["truth"], strict=True)]
        text = f"{kind}, {name}: utilisation {mean(found[name]):.3f}, {mean(ratios):.3f} of the truth's"
        verdicts.append((text, mean(ratios) >= UTILISATION if name == RUNNING_ONLY else None))
    if found["longest wait"]:
        verdicts.append((f"{kind}: it waited {max(found['longest wait']):.1f} hours at most", None))
    return verdicts


if __name__ == "__main__":
    main()

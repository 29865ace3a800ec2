"""Paired measurement: in each round every contestant trains one block, one after the other, in rotating order.

    round 1   A B C D
    round 2   A D C B
    round 3   C D A B …

What slows the machine down for a while slows neighbours alike, so the ratio of two contestants is taken round by
round, and the median of these ratios is the result.
"""

import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.group import Contestant, Group


@dataclass(frozen=True)
class Options:
    """How long to measure."""

    rounds: int = 7
    steps: int = 10
    warmup: int = 2
    timeout: float = 600.0


@dataclass(frozen=True)
class Target:
    """The least ratio that the best of `contestants` (by its median) should have to `base`."""

    contestants: Sequence[str]
    base: str
    ratio: float


@dataclass(frozen=True)
class Result:
    """Of every contestant: tokens a second and the last loss of every round, and the cores it used while others were
    measured."""

    options: Options
    rates: dict[str, list[float]]
    losses: dict[str, list[float]]
    idle: dict[str, float]

    def ratios(self, target: Target) -> tuple[str, list[float]]:
        """What was divided, and the ratio of each round."""
        best = max(target.contestants, key=lambda name: median(self.rates[name]))
        values = [own / base for own, base in zip(self.rates[best], self.rates[target.base], strict=True)]
        return f"{best} / {target.base}", values


def measure(contestants: Sequence[Contestant], options: Options, say: Callable[[str], None]) -> Result:
    """Starts the contestants, measures, ends them. Raises `ContestantFailed`; leaves nothing behind, also then."""
    rates: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    with _ending_tidily(), tempfile.TemporaryDirectory(prefix="bench-") as folder, _running() as groups:
        for index, contestant in enumerate(contestants):
            say(f"starting {contestant.name}")
            (place := Path(folder) / str(index)).mkdir()
            groups.append(Group(contestant, place, options.timeout))
            groups[-1].start()
        for number in range(options.rounds):
            for group in _order(groups, number):
                rates[group.name].append(group.block(options.steps, options.warmup))
            latest = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in rates.items())
            say(f"round {number + 1} of {options.rounds}: {latest}")
        losses = {group.name: group.losses for group in groups}
        return Result(options, rates, losses, {group.name: group.idle_share for group in groups})


def table(result: Result, targets: Sequence[Target]) -> str:
    """The result for people."""
    options, ratios = result.options, [result.ratios(target) for target in targets]
    width = max(map(len, [*result.rates, *(name for name, _ in ratios)]))
    lines = [f"{'tokens a second':{width}}  {'min':>8} {'median':>8} {'max':>8}   idle cores"]
    lines += [
        f"{name:{width}}  {_spread(rates, ',.0f')}   {result.idle[name]:.3f}" for name, rates in result.rates.items()
    ]
    lines += ["", f"{'ratio, round by round':{width}}  {'min':>8} {'median':>8} {'max':>8}   target"]
    for target, (name, values) in zip(targets, ratios, strict=True):
        verdict = "met" if median(values) >= target.ratio else "MISSED"
        lines.append(f"{name:{width}}  {_spread(values, '.3f')}   ≥ {target.ratio:.2f} {verdict}")
    lines += ["", f"{options.rounds} rounds of {options.steps} steps after {options.warmup} unmeasured; {machine()}"]
    return "\n".join(lines)


def as_json(result: Result, targets: Sequence[Target]) -> dict[str, object]:
    """The result for programs: every single figure."""
    ratios = []
    for target in targets:
        name, values = result.ratios(target)
        ratios.append({"name": name, "rounds": values, "median": median(values), "target": target.ratio})
    return {
        "machine": machine(),
        **asdict(result.options),
        "tokens_per_second": result.rates,
        "losses": result.losses,
        "idle_cores": result.idle,
        "ratios": ratios,
    }


def _spread(values: Sequence[float], form: str) -> str:
    return " ".join(f"{value:>8{form}}" for value in (min(values), median(values), max(values)))


def machine() -> str:
    """Where this was measured, and how busy it is."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} {platform.machine()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def _order(groups: Sequence[Group], number: int) -> list[Group]:
    """Another first one each round, and every second round backwards, so that neighbours change too."""
    start = number % len(groups)
    order = [*groups[start:], *groups[:start]]
    return order[::-1] if number % 2 else order


@contextmanager
def _running() -> Iterator[list[Group]]:
    """A list of groups; whatever happens, all have ended afterwards."""
    groups: list[Group] = []
    try:
        yield groups
    finally:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        finished = sys.exc_info()[0] is None
        for group in groups:
            group.release()
        for group in groups:
            group.end(patience=20 if finished else 10)
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def _ending_tidily() -> Iterator[None]:
    """SIGTERM and a closed terminal end the driver like Ctrl-C."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

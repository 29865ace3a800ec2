"""Paired measurement: in each round every contestant trains one block, one after the other, in rotating order.

    round 1   A B C D
    round 2   A D C B
    round 3   C D A B …

What slows the machine down for a while slows neighbours alike, so the ratio of two contestants is taken round by
round, and the median of these ratios is the result. A ratio of contestants that train different things says nothing:
`check_losses` comes first.
"""

import math
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.bootstrap import median_interval
from benchmarks.group import Contestant, Group
from benchmarks.machine import machine, processor

# Relative, after the same steps: sums in another order, and in bf16 roundings at other places. A wrong rate or a lost
# gradient makes more.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-3}


@dataclass(frozen=True)
class Options:
    """How long to measure: `settle` steps before the first round, and `warmup` before each block, are not measured.

    `tolerance`: relative, of the losses.
    """

    rounds: int = 21
    steps: int = 5
    warmup: int = 1
    settle: int = 3
    timeout: float = 600.0
    tolerance: float = LOSS_TOLERANCE["fp32"]


@dataclass(frozen=True)
class Target:
    """The least ratio that the best of `contestants` (by its median) should have to `base`, or to the best of them;
    None: it is only shown."""

    contestants: Sequence[str]
    base: str | Sequence[str]
    ratio: float | None


@dataclass(frozen=True)
class Ratio:
    """What was divided, and the quotient of each round."""

    name: str
    rounds: Sequence[float]
    wanted: float | None

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 % confidence."""
        return median_interval(self.rounds)

    @property
    def verdict(self) -> str:
        if self.wanted is None:
            return ""
        return f"≥ {self.wanted:.2f} {'met' if self.median >= self.wanted else 'MISSED'}"


class LossesDiffer(RuntimeError):
    """Contestants that should train the same do not; the message says which."""


@dataclass(frozen=True)
class Result:
    """Of every contestant: tokens a second and the last loss of every round, and the cores it used while others were
    measured. `trains` as in `Contestant`, `notes` as in `Done`."""

    options: Options
    rates: dict[str, list[float]]
    losses: dict[str, list[float]]
    idle: dict[str, float]
    trains: dict[str, str | None]
    notes: dict[str, str] = field(default_factory=dict)

    def best(self, names: str | Sequence[str]) -> str:
        """The one with the highest median."""
        return max([names] if isinstance(names, str) else names, key=lambda name: median(self.rates[name]))

    def ratio(self, target: Target) -> Ratio:
        """The ratio of each round."""
        best, base = self.best(target.contestants), self.best(target.base)
        values = [own / other for own, other in zip(self.rates[best], self.rates[base], strict=True)]
        return Ratio(f"{best} / {base}", values, target.ratio)

    def check_losses(self) -> None:
        """Compare the last loss of every block. Raises `LossesDiffer`."""
        tolerance = self.options.tolerance
        for trains in {name: None for name in self.trains.values() if name is not None}:
            group = [name for name, its in self.trains.items() if its == trains]
            for number, losses in enumerate(zip(*(self.losses[name] for name in group), strict=True), start=1):
                first = losses[0]
                if not all(abs(loss - first) <= tolerance * abs(first) for loss in losses):  # NaN never agrees
                    text = ", ".join(f"{name} {loss:.6f}" for name, loss in zip(group, losses, strict=True))
                    raise LossesDiffer(f"the losses at the end of block {number} differ: {text}")


def measure(contestants: Sequence[Contestant], options: Options, say: Callable[[str], None]) -> Result:
    """Starts the contestants, measures, ends them, compares losses. Raises `ContestantFailed` and `LossesDiffer`;
    leaves nothing behind, also then."""
    rates: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    with _ending_tidily(), tempfile.TemporaryDirectory(prefix="bench-") as folder, _running() as groups:
        for index, contestant in enumerate(contestants):
            say(f"starting {contestant.name}")
            (place := Path(folder) / str(index)).mkdir()
            groups.append(Group(contestant, place, options.timeout))
            groups[-1].start()
            groups[-1].settle(options.settle)
        for number in range(options.rounds):
            for group in _order(groups, number):
                rates[group.name].append(group.block(group.steps or options.steps, options.warmup))
            latest = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in rates.items())
            say(f"round {number + 1} of {options.rounds}: {latest}")
        losses = {group.name: group.losses for group in groups}
        idle = {group.name: group.idle_share for group in groups}
        trains = {group.name: group.trains for group in groups}
        notes = {group.name: group.note for group in groups}
        result = Result(options, rates, losses, idle, trains, notes)
    result.check_losses()
    return result


def table(result: Result, targets: Sequence[Target], last: tuple[str, Mapping[str, str]] = ("", {})) -> str:
    """The result for people. `last`: one more column, its heading and its text by contestant."""
    options, ratios = result.options, [result.ratio(target) for target in targets]
    width = max(map(len, [*result.rates, *(ratio.name for ratio in ratios)]))
    heading, texts = last
    lines = [f"{'tokens a second':{width}}  {'min':>8} {'median':>8} {'max':>8}   idle cores   {heading}".rstrip()]
    for name, rates in result.rates.items():
        idle, text = f"{result.idle[name]:.3f}", texts.get(name, "")
        lines.append(f"{name:{width}}  {_spread(rates, ',.0f')}   {idle:10}   {text}".rstrip())
    heading = f"{'min':>8} {'median':>8} {'max':>8}   95 % interval"
    lines += ["", f"{'ratio, round by round':{width}}  {heading}   target"]
    for ratio in ratios:
        spread, (low, high) = _spread(ratio.rounds, ".3f"), ratio.interval
        lines.append(f"{ratio.name:{width}}  {spread}   {low:.3f} to {high:.3f}   {ratio.verdict}".rstrip())
    lines += [
        "",
        f"{options.rounds} rounds of {options.steps} steps after {options.warmup} unmeasured; the losses at the end of "
        f"every block agree to {options.tolerance:g}",
        machine(),
    ]
    return "\n".join(lines)


def as_json(result: Result, targets: Sequence[Target]) -> dict[str, object]:
    """The result for programs: every single figure."""
    ratios = [result.ratio(target) for target in targets]
    return {
        "machine": machine(),
        "processor": processor()._asdict(),
        **asdict(result.options),
        "tokens_per_second": result.rates,
        "losses": result.losses,
        "idle_cores": result.idle,
        "ratios": [
            {
                "name": ratio.name,
                "rounds": ratio.rounds,
                "median": ratio.median,
                "interval": ratio.interval,
                "target": ratio.wanted,
            }
            for ratio in ratios
        ],
    }


def rounded(value: object, digits: int = 5) -> object:
    """The same with all floats rounded to so many significant digits, which keeps files small."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    return [rounded(inner, digits) for inner in value] if isinstance(value, list | tuple) else value


def _spread(values: Sequence[float], form: str) -> str:
    return " ".join(f"{value:>8{form}}" for value in (min(values), median(values), max(values)))


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

"""One run of the fake service: what is known of it, and its curves as functions of the step."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SCRIPT = "<img src=x onerror=\"document.title='hacked'\">"
SPIKE_STEP, SPIKE = 61_234, 95.0


def run_id(number: int) -> str:
    return f"{number * 2654435761 % (1 << 48):012x}"


@dataclass
class Run:
    """One run and its job. `speed`: steps per second since `since`, of a run that grows."""

    number: int
    name: str
    state: str
    step: int | None
    total_steps: int | None = 2000
    owner: str = "ada"
    tags: list[str] = field(default_factory=list)
    task: str = "language_model"
    ranks: int = 8
    job: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    speed: float = 0.0
    since: float = 0.0
    began: float | None = None
    updated: float | None = None
    log_every: int = 1
    spiky: bool = False
    more_metrics: tuple[str, ...] = ()
    late: str | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    extra_steps: int = 0
    points: dict[str, list[tuple[int, float | None]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def id(self) -> str:
        return run_id(self.number)

    def last_step(self, now: float) -> int | None:
        if self.step is None:
            return None
        grown = self.step + self.extra_steps + int(self.speed * max(0.0, now - self.since))
        return grown if self.total_steps is None else min(grown, self.total_steps)

    def keys(self) -> list[str]:
        own = {"translation": ("valid_bleu",), "classification": ("valid_accuracy",)}.get(
            self.task, ("perplexity", "valid_perplexity")
        )
        return [
            "loss",
            "lr",
            "grad_norm",
            "tokens_per_second",
            "milliseconds_per_step",
            "valid_loss",
            *own,
            *self.more_metrics,
        ]

    def value(self, key: str, step: int) -> float | None:
        """A metric at one step: the same for the same run, key and step."""
        noise = _noise(self.number, key, step)
        floor = 2.2 + 0.5 * math.sin(self.number)
        loss = floor + 6.0 * math.exp(-step / (0.12 * (self.total_steps or 2000))) + 0.12 * noise
        if self.spiky and step == SPIKE_STEP and key == "loss":
            return SPIKE
        if key == "grad_norm" and step == 17:
            return None
        match key:
            case "loss":
                return loss
            case "valid_loss":
                return loss + 0.15 + 0.02 * noise
            case "perplexity":
                return math.exp(loss)
            case "valid_perplexity":
                return math.exp(loss + 0.15)
            case "lr":
                done = min(1.0, step / (self.total_steps or 2000))
                warm = (self.total_steps or 2000) // 20 or 1
                return 3e-4 * min(1.0, step / warm) * (0.5 + 0.5 * math.cos(math.pi * done))
            case "grad_norm":
                return 0.4 + 2.0 * math.exp(-step / 300) + 0.1 * abs(noise)
            case "tokens_per_second":
                return 41_000.0 * self.ranks / 8 * (1 + 0.03 * noise)
            case "milliseconds_per_step":
                return 199.8 * (1 - 0.03 * noise)
            case "valid_bleu":
                return 34 * (1 - math.exp(-step / 500)) + 0.3 * noise
            case "valid_accuracy":
                return 0.94 * (1 - math.exp(-step / 200)) + 0.01 * noise
        return 1.0 + 0.1 * noise

    def curve(self, key: str, now: float) -> list[tuple[int, float | None]]:
        """The points so far; they are kept, as long runs have many."""
        last = self.last_step(now) or 0
        every = max(1, (self.total_steps or 2000) // 20) if key.startswith("valid_") else self.log_every
        with self.lock:  # requests are answered side by side
            kept = self.points.setdefault(key, [])
            begin = (kept[-1][0] if kept else 0) + every
            kept += [(step, self.value(key, step)) for step in range(begin, last + 1, every)]
        return kept if not kept or kept[-1][0] <= last else [point for point in kept if point[0] <= last]

    def at(self, x: str, step: int) -> float:
        return {"seconds": step * 0.2, "samples": step * 256.0, "tokens": step * 8192.0}.get(x, float(step))

    def metrics(self, now: float) -> dict[str, float | None]:
        step = self.last_step(now)
        return {} if not step else {key: self.value(key, step) for key in self.keys()}


def _noise(number: int, key: str, step: int) -> float:
    seed = hash((number, len(key), step)) & 0xFFFFFFFF
    seed = (seed ^ (seed >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return ((seed ^ (seed >> 16)) & 0xFFFF) / 32768.0 - 1.0


def decimated(points: Sequence[tuple[float, float | None]], width: int) -> tuple[list[float], list[float | None]]:
    """The smallest and the largest of each of `width` buckets, in order."""
    if len(points) <= 2 * width:
        return [x for x, _ in points], [y for _, y in points]
    kept: list[tuple[float, float | None]] = []
    for bucket in range(width):
        part = points[bucket * len(points) // width : (bucket + 1) * len(points) // width]
        known = [point for point in part if point[1] is not None]
        if not known:
            kept += part[:1]
            continue
        ends = {min(known, key=lambda point: point[1] or 0.0), max(known, key=lambda point: point[1] or 0.0)}
        kept += sorted(ends)
    return [x for x, _ in kept], [y for _, y in kept]

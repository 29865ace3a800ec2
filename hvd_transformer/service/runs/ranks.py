"""What each rank of a run does, by the heartbeats, and which rank the others wait for."""

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hvd_transformer.monitoring.stall_report import PeerHeartbeat, late_ranks, stall_report
from hvd_transformer.service.runs.metrics.curve import COMPARISONS
from hvd_transformer.service.runs.metrics.metrics_rows import MOST_STEP, number
from hvd_transformer.service.runs.plain_files import list_folder, open_plain, plain

_FILE = re.compile(r"beat-[0-9]{1,6}")
_MOST_BEAT_BYTES = 1 << 14
_MOST_RANKS = 100_000
_SILENT_SECONDS = 5.0  # of a launched rank: its host tells its heartbeat every second
# As in `Watchdog`, whose ranks share a folder: each writes every half second, or more seldom where they are many.
_BEAT_SECONDS, _BEATS_PER_SECOND, _MOST_BEAT_SECONDS, _SILENT_BEATS = 0.5, 64, 9.0, 3
_QUIET_SECONDS = 15.0  # without progress: somebody waits for somebody
_CLOCK_SECONDS = 60.0  # by which the clock of the storage may differ from this one
# As in `Stragglers`.
_SLOW, _LEAST_MILLISECONDS = 1.2, 5.0


@dataclass(frozen=True)
class RankState:
    """One rank.

    `age`: seconds since its heartbeat; `memory`: bytes of its process; `work_seconds`: what it computes per step,
    without waiting for others, when the ranks were last compared; `work_ratio`: that relative to the other ranks;
    `late`: the others wait for it, or it is silent or slow.
    """

    rank: int
    host: str
    step: int
    phase: str
    waits_for: str | None
    age: float
    tokens_per_second: float | None
    memory: int | None
    work_seconds: float | None
    work_ratio: float | None
    late: bool


def read_heartbeats(run: Path) -> list[PeerHeartbeat]:
    """The heartbeats in the run directory: those of ranks that no launcher started."""
    try:
        names = [name for name in list_folder(run / "logs") if _FILE.fullmatch(name)]
    except OSError:
        return []
    found: list[tuple[Any, float]] = []
    for name in names:
        try:
            file = open_plain(run / "logs" / name)
            try:
                found.append((json.loads(os.read(file, _MOST_BEAT_BYTES)), os.fstat(file).st_mtime))
            finally:
                os.close(file)
        except (OSError, ValueError, RecursionError):  # gone, or truncated by a full disk
            continue
    # The times are by the clock of the storage: that of the newest heartbeat is now, unless all are old.
    now, newest = time.time(), max((modified for _, modified in found), default=0.0)
    now = newest if abs(now - newest) < _CLOCK_SECONDS else now
    return [PeerHeartbeat(beat, max(0.0, now - modified)) for beat, modified in found]


def rank_states(
    beats: Sequence[PeerHeartbeat], compared: Sequence[Mapping[str, Any]], *, launched: bool
) -> tuple[list[RankState], str | None]:
    """The ranks in order, and one sentence that names the late one, if any.

    `compared`: the last lines of metrics.jsonl that compare the ranks' work. `launched`: the heartbeats are from a
    launcher.
    """
    seen = sorted((found for beat in beats if (found := _checked(beat))), key=lambda found: int(found.beat["rank"]))
    shared = min(max(_BEAT_SECONDS, len(seen) / _BEATS_PER_SECOND), _MOST_BEAT_SECONDS)
    late, sentence = _late(seen, _SILENT_SECONDS if launched else max(_SILENT_SECONDS, _SILENT_BEATS * shared))
    if not late:
        late, sentence = _slow(seen, compared)
    ratios = _work_ratios(seen)
    states = [
        RankState(
            rank=found.beat["rank"],
            host=found.beat["host"],
            step=found.beat["step"],
            phase=found.beat["phase"],
            waits_for=found.beat["waits_for"],
            age=round(found.age, 1),
            tokens_per_second=found.beat["tokens_per_second"],
            memory=found.beat["memory"],
            work_seconds=found.beat["work_seconds"],
            work_ratio=ratios.get(found.beat["rank"]),
            late=found.beat["rank"] in late,
        )
        for found in seen
    ]
    return states, sentence


def _late(seen: Sequence[PeerHeartbeat], silent_seconds: float) -> tuple[set[int], str | None]:
    """The ranks that are silent, or that the others wait for when nothing goes on."""
    silent = [found for found in seen if found.age > silent_seconds]
    stands_still = any(
        found.beat["late"] or found.beat["progress_seconds"] > min(_QUIET_SECONDS, found.beat["limit_seconds"] / 2)
        for found in seen
    )
    if not silent and not stands_still:
        return set(), None
    late = late_ranks(seen, silent_seconds) if stands_still else silent
    hosts = {found.beat["rank"]: found.beat["host"] for found in seen}
    told = stall_report(
        seen if stands_still else silent,
        [hosts.get(rank, "unknown") for rank in range(max(hosts) + 1)] if stands_still else [],
        silent_seconds,
    )
    return {found.beat["rank"] for found in late}, told


def _slow(seen: Sequence[PeerHeartbeat], compared: Sequence[Mapping[str, Any]]) -> tuple[set[int], str | None]:
    """The rank whose work took longer than that of the others each time that it was compared."""
    slowest = {rank for line in compared if (rank := _slow_rank(line)) is not None}
    hosts = {found.beat["rank"]: found.beat["host"] for found in seen}
    if len(compared) < COMPARISONS or len(slowest) != 1 or not all(_slow_rank(line) in hosts for line in compared):
        return set(), None
    rank, last = slowest.pop(), compared[-1]
    own, others = last["slowest_work_milliseconds"], last["others_work_milliseconds"]
    return {rank}, (
        f"rank {rank} on host {hosts[rank]} is slow: {own:.0f} ms of work per step, the others need {others:.0f} ms"
    )


def _work_ratios(seen: Sequence[PeerHeartbeat]) -> dict[int, float]:
    """Each rank's work divided by that of the others: as in `Stragglers`, their median without the slowest rank."""
    work = {found.beat["rank"]: seconds for found in seen if (seconds := found.beat["work_seconds"]) is not None}
    others = median(sorted(work.values())[:-1]) if len(work) > 1 else 0.0
    ratios = {rank: seconds / others for rank, seconds in work.items()} if others else {}
    return {rank: ratio for rank, ratio in ratios.items() if math.isfinite(ratio)}


def _slow_rank(line: Mapping[str, Any]) -> int | None:
    """The rank that was slow in one comparison, if any was."""
    keys = ("slowest_rank", "slowest_work_milliseconds", "others_work_milliseconds")
    rank, own, others = (number(line.get(key)) for key in keys)
    if rank is None or own is None or others is None:
        return None
    return int(rank) if own - others > max((_SLOW - 1) * others, _LEAST_MILLISECONDS) else None


def _checked(found: PeerHeartbeat) -> PeerHeartbeat | None:
    """The heartbeat with what is needed of it, each of its type; None without a rank."""
    beat = found.beat
    if not isinstance(beat, dict) or not isinstance(beat.get("rank"), int) or not 0 <= beat["rank"] < _MOST_RANKS:
        return None
    waits_for = beat.get("waits_for")
    checked = {
        "rank": int(beat["rank"]),
        "host": plain(str(beat.get("host", "unknown"))[:255]),
        "step": min(int(number(beat.get("step")) or 0), MOST_STEP),
        "phase": plain(str(beat.get("phase", ""))[:100]),
        "waits_for": None if waits_for is None else plain(str(waits_for)[:100]),
        "late": beat.get("late") is True,
        "tokens_per_second": number(beat.get("tokens_per_second")),
        "memory": None if (memory := _size(beat.get("memory"))) is None else int(memory),
        "work_seconds": _size(beat.get("work_seconds")),
    }
    seconds = {key: number(beat.get(key)) for key in ("phase_seconds", "progress_seconds", "limit_seconds")}
    checked |= {key: value or 0.0 for key, value in seconds.items()}
    checked["limit_seconds"] = checked["limit_seconds"] or 2 * _QUIET_SECONDS
    return PeerHeartbeat(checked, found.age)


def _size(value: object) -> float | None:
    """The value if it is a number that is not negative."""
    found = number(value)
    return None if found is None or found < 0 else found

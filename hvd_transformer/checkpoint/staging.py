"""How ranks tell each other that their parts of a checkpoint are written: by files in its staging folder.

    writing-5   rank 5 is writing           written-5   it has; holds the checksums           neither   it could not

A rank waits for those that report to it, and then reports for all of them: the ranks of a host to the host's first one,
and these to rank 0. So rank 0 opens as many files as there are hosts and ranks on its own.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

from hvd_transformer.checkpoint.crc import Range, merge
from hvd_transformer.checkpoint.layout import Writers
from hvd_transformer.checkpoint.manifest import RANGE_BYTES

# The interval at which a rank looks whether another one has written, which doubles from the first to the second.
_POLL_SECONDS = (0.005, 0.25)
# How long it waits if the job is ending because of an error: the other may be gone.
_LAST_SECONDS = 10.0
Checksums = dict[str, list[Range]]  # by file


class Writing:
    """What the thread that writes a rank's part, and the one that waits for it, tell each other."""

    def __init__(self) -> None:
        self.ending = Event()  # the job ends because of an error: other ranks may be gone
        self.blocks = 0  # that are written
        self.waits = False  # this rank's part is written, and the thread waits for those of others

    def advance(self) -> None:
        self.blocks += 1


def enter(staging: Path, rank: int) -> bool:
    """Note that the rank will write; False if it does not see the folder or cannot write in it.

    The file is there before anyone waits for it to go: a network file system may show new files late.
    """
    try:
        (staging / f"writing-{rank}").touch(exist_ok=False)
    except OSError:
        return False
    return True


def report(staging: Path, rank: int, checksums: Mapping[str, Sequence[Range]]) -> None:
    """Note that the rank and those that report to it have written."""
    marker = staging / f"writing-{rank}"
    joined = {file: merge(ranges, RANGE_BYTES) for file, ranges in checksums.items()}
    marker.write_text(json.dumps(joined), encoding="utf-8")
    marker.rename(staging / f"written-{rank}")


def fail(staging: Path, rank: int) -> None:
    """Note that the rank, or one that reports to it, could not write. Works on a full disk."""
    (staging / f"writing-{rank}").rename(staging / f"failed-{rank}")


def collect(staging: Path, rank: int, writers: Writers, writing: Writing) -> Checksums:
    """Wait for the ranks that report to this one; returns their checksums.

    Raises `OSError` if one could not write, or is late and the job is ending: it may be gone.
    """
    found: Checksums = {}
    writing.waits = True
    for other in _reporters(rank, writers):
        _wait(staging / f"writing-{other}", other, writing.ending)
        report = staging / f"written-{other}"
        try:
            content = json.loads(report.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise OSError(f"rank {_first_failed(staging, other)} could not write its part; its log says why") from None
        report.unlink()
        writing.advance()
        for file, ranges in content.items():
            found.setdefault(file, []).extend(Range(*own) for own in ranges)
    return found


def _reporters(rank: int, writers: Writers) -> list[int]:
    """The other ranks of the host if this is its first one; for rank 0 also the first ones of the other hosts."""
    firsts = [ranks[0] for ranks in writers.ranks]
    own = writers.ranks[writers.host(rank)]
    return (own[1:] if rank == own[0] else []) + (firsts[1:] if rank == firsts[0] else [])


def _wait(marker: Path, rank: int, ending: Event) -> None:
    pause, longest = _POLL_SECONDS
    limit = float("inf")
    while _exists(marker):
        if ending.is_set():
            limit = min(limit, time.monotonic() + _LAST_SECONDS)
        if time.monotonic() > limit:
            raise OSError(f"rank {rank} has not written its part")
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _exists(path: Path) -> bool:
    try:
        path.open("rb").close()  # on a network file system, opening asks the server
    except FileNotFoundError:
        return False
    return True


def _first_failed(staging: Path, rank: int) -> int:
    """The rank whose failure `rank` reports, as far as the folder shows it."""
    failed = {int(path.name.removeprefix("failed-")) for path in staging.glob("failed-*")}
    return min(failed - {rank}, default=rank)

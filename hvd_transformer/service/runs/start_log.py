"""What the log of rank 0 tells of a run's last start, and no other file before the end: how many ranks and steps."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from hvd_transformer.service.runs.plain_files import open_plain

_HEAD_BYTES, _TAIL_BYTES = 1 << 14, 1 << 16
_RANKS = re.compile(rb" rank 0 of (\d{1,9}) \(")
_STEPS = re.compile(rb" step \d{1,18} of (\d{1,18}),")


class StartFacts(NamedTuple):
    """None: not known."""

    world: int | None = None
    total_steps: int | None = None


def read_start(run: Path) -> StartFacts:
    """From the last line in the log's end that has it, or else in its beginning."""
    try:
        file = open_plain(run / "logs" / "rank-000.log")
    except OSError:
        return StartFacts()
    try:
        size = os.fstat(file).st_size
        text = os.pread(file, _HEAD_BYTES, 0) + b"\n" + os.pread(file, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    except OSError:
        return StartFacts()
    finally:
        os.close(file)
    ranks, steps = _RANKS.findall(text), _STEPS.findall(text)
    return StartFacts(int(ranks[-1]) if ranks else None, int(steps[-1]) if steps else None)

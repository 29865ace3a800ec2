"""The newest texts that the model of a run has written, from the end of a samples.jsonl of any size."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_transformer.service.runs.metrics.metrics_rows import parse
from hvd_transformer.service.runs.plain_files import open_plain, plain

_TAIL_BYTES = 1 << 18  # more than a line of `hvd-train` has
_MOST = 10  # of the newest steps, of the samples of a step, and of the texts of a sample


@dataclass(frozen=True)
class StepSamples:
    """What the model wrote at one evaluation: each sample is some texts by name, such as "prompt", "continuation"."""

    step: int
    samples: Sequence[Mapping[str, str]]


def newest_samples(run: Path) -> list[StepSamples]:
    """The samples of the last evaluations, oldest first; what is unreadable is left out.

    A step that was evaluated again after a resume counts once.
    """
    try:
        lines = _last_lines(run / "samples.jsonl")
    except OSError:
        return []
    found = {int(row["step"]): samples for row in parse(b"\n".join(lines)) if (samples := _texts(row.get("samples")))}
    return [StepSamples(step, samples) for step, samples in found.items()]


def _last_lines(path: Path) -> list[bytes]:
    """The last whole lines of the file. Raises `OSError`."""
    file = open_plain(path)
    try:
        begin = max(0, os.fstat(file).st_size - _TAIL_BYTES)
        data = os.pread(file, _TAIL_BYTES, begin)
    finally:
        os.close(file)
    lines = data.split(b"\n")[:-1]  # the last one is being written
    return (lines[1:] if begin else lines)[-_MOST:]


def _texts(samples: Any) -> list[dict[str, str]]:
    """The texts of a line; what is no text is left out."""
    found = []
    for sample in samples[:_MOST] if isinstance(samples, list) else ():
        items = list(sample.items())[:_MOST] if isinstance(sample, dict) else ()
        if texts := {plain(name): plain(text) for name, text in items if isinstance(text, str)}:
            found.append(texts)
    return found

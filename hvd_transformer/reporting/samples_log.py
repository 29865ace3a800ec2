"""The texts that a model writes during training, on disk: `samples.jsonl`, one JSON object per evaluation."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvd_transformer.reporting.step_lines import AppendedFile, cut_after

_MOST_CHARACTERS = 1000  # of a text


class SamplesLog:
    """Append to `samples.jsonl` of a run directory, which the first samples create; used only by rank 0.

    Lines after `resume_step`, or with `evaluates` from it on, are removed, as from metrics.jsonl. A full disk is
    reported once through `warn`; the lines stay in memory until there is space.
    """

    def __init__(self, folder: Path, resume_step: int, warn: Callable[[str], None], *, evaluates: bool = False) -> None:
        self._path = folder / "samples.jsonl"
        self._warn = warn
        self._warned = False
        cut_after(self._path, lambda row: row["step"] <= resume_step - evaluates)
        self._lines = AppendedFile(self._path)

    def write(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Write one line: {"step": …, "samples": [{"prompt": …, "continuation": …}, …]}. Long texts are truncated."""
        shown = [{name: _shortened(text) for name, text in sample.items()} for sample in samples]
        line = json.dumps({"step": step, "samples": shown}, ensure_ascii=False) + "\n"
        error = self._lines.append(line.encode(errors="replace"))
        if error is not None and not self._warned:
            self._warn(
                f"{self._path}: cannot write: {error.strerror}. Training continues; the samples stay in memory until "
                "there is space."
            )
        self._warned = error is not None

    def close(self) -> None:
        """Try once more to write pending lines, then close the file."""
        if self._warned:
            self._lines.append(b"")
        self._lines.close()


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"

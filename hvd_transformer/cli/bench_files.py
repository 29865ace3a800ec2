"""The files that `hvd-transformer bench` writes; rank 0 writes them."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_transformer import atomic
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.bench.report import Report


@dataclass(frozen=True)
class BenchFiles:
    """`json`: all figures; `plot`: a chart; `constants`: what `plan --scale` reads. None: not written."""

    json: Path | None
    plot: Path | None = None
    constants: Path | None = None

    def check(self) -> None:
        """Raise `UserError` for a file that cannot be written, before anything is measured."""
        if self.plot is not None and self.plot.suffix.lower() != ".png":
            raise UserError(f"--plot {self.plot}: must end in .png")
        for option, file in (("--json", self.json), ("--plot", self.plot)):
            if file is not None:
                _check(option, file, file.absolute().parent)
        if self.constants is not None:  # its folder is made
            parents = self.constants.absolute().parents
            _check("--constants", self.constants, next(parent for parent in parents if parent.exists()))

    def write(self, report: "Report") -> list[str]:
        """Write them; return a line for each. Raises `UserError`."""
        written = []
        try:
            if self.json is not None:
                atomic.write_text(self.json, json.dumps(report.values, indent=1) + "\n")
                written.append(f"figures: {self.json}")
            if self.plot is not None and report.draw is not None:
                atomic.write_bytes(self.plot, report.draw())
                written.append(f"chart: {self.plot}")
        except OSError as error:
            raise UserError(f"{error.filename or self.json}: cannot be written: {error.strerror}") from None
        if self.constants is not None and report.constants is not None:
            from hvd_transformer.bench.constants_file import write

            write(report.constants, self.constants)
            written.append(f"constants for plan --scale: {self.constants}")
        return written


def _check(option: str, file: Path, folder: Path) -> None:
    if file.is_dir():
        raise UserError(f"{option} {file}: is a folder; name a file")
    if not folder.is_dir():
        raise UserError(f"{option} {file}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK) or (file.exists() and not os.access(file, os.W_OK)):
        raise UserError(f"{option} {file}: cannot be written")

"""What `launch` starts on every rank, from the words behind its `--`: checked before anything starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_transformer.config import Config


@dataclass(frozen=True)
class Launched:
    """`words` are the worker's command line, `again` those of a restart. `trains`: it writes a run directory."""

    words: list[str]
    again: list[str]
    config: "Config"
    trains: bool

    @property
    def log(self) -> Path | None:
        """Where all that the ranks print is kept."""
        return Path(self.config.output_dir).expanduser() / "logs" / "launch.log" if self.trains else None


def worker_of(words: Sequence[str]) -> Launched:
    """hvd-train with these arguments; or `hvd-transformer evaluate`, where they begin so. Raises `UserError`."""
    return _evaluate(words) if words[:1] == ("evaluate",) else _train(words)


def _train(words: Sequence[str]) -> Launched:
    from hvd_transformer.cli.train import command as train
    from hvd_transformer.config import load

    given = train.make_context("hvd-train", list(words)).params
    config = load(given["preset"], given["file"], given["settings"])
    worker = ["hvd-train", *words]
    return Launched(
        worker, [*worker, "checkpoint.resume=auto"] if config.checkpoint.resume == "never" else worker, config, True
    )


def _evaluate(words: Sequence[str]) -> Launched:
    from hvd_transformer.cli.evaluate import check, evaluate

    given = evaluate.make_context("evaluate", list(words[1:])).params
    check(given["checkpoint"], given["settings"])
    from hvd_transformer.training.evaluation_job import Request, evaluation_config, read_checkpoint

    request = Request(given["checkpoint"], given["settings"], given["split"], given["data"])
    worker = ["hvd-transformer", *words]
    return Launched(worker, worker, evaluation_config(read_checkpoint(request.checkpoint), request), False)

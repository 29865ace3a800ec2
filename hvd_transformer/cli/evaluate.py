"""`hvd-transformer evaluate`: the metrics of a trained model, computed by all ranks or by one process."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_transformer.cli import options
from hvd_transformer.cli.rank_process import run_ranks, tensor_of
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.comm.world import World
    from hvd_transformer.monitoring.watchdog import Watchdog
    from hvd_transformer.training.evaluate_job import Result
    from hvd_transformer.training.process import StopRequest


@click.command()
@options.checkpoint
@click.option(
    "--split", type=click.Choice(["train", "valid", "test"]), help="Split of the data. Default: test, if there is one."
)
@click.option(
    "--data", type=options.PATH, metavar="PATH", help="Evaluate on other data: a file, or a folder with the split."
)
@click.option(
    "--trust-task", is_flag=True, help="Import the task class that the checkpoint names, which runs its code."
)
@click.option(
    "--kept-code",
    is_flag=True,
    help="Like --trust-task, but import it from the code that the service kept with the run, as it was at submit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options.settings
def evaluate(
    checkpoint: Path,
    split: str | None,
    data: Path | None,
    trust_task: bool,
    kept_code: bool,
    as_json: bool,
    settings: tuple[str, ...],
) -> None:
    """Evaluate CHECKPOINT, a checkpoint or a run directory (its best checkpoint), on a split of its training data.

    Runs in one process or on any number of ranks: `horovodrun -np 2 hvd-transformer evaluate …`, or
    `hvd-transformer launch -np 2 -- evaluate …`. KEY=VALUE may set keys that a resumed run may change, such as
    training.eval_batch_size, translation.beam or parallel.pipeline. The whole split is evaluated, whatever
    training.eval_batches was in training, unless KEY=VALUE sets it. With --data, data.text_column and data.label_column
    name the columns of that file.
    """
    mistake, shown = None, list[str]()
    try:
        check(checkpoint, settings)
    except UserError as error:  # raised once all ranks have met: only rank 0 needs to see the folder
        mistake = error

    def work(world: "World", stop: "StopRequest", watchdog: "Watchdog") -> int:
        from hvd_transformer.reporting.progress import Progress, Silent
        from hvd_transformer.training.evaluate_job import Request
        from hvd_transformer.training.evaluate_job import evaluate as evaluate_checkpoint

        screen = sys.stderr if as_json else sys.stdout
        progress = Progress(screen, terminal=False) if world.rank == 0 else Silent()
        request = Request(checkpoint, settings, split, data, trust_task, kept_code)
        result = evaluate_checkpoint(request, world, stop, watchdog, progress)
        if world.rank == 0:
            shown.append(_as_json(result, world.size) if as_json else _as_text(result, world.size))
        return 0

    code = run_ranks("hvd-transformer", work, tensor_of(settings), mistake=mistake)
    for text in shown:
        click.echo(text)
    sys.exit(code)


def check(checkpoint: Path, settings: Sequence[str]) -> None:
    """Raise `UserError` for what can be seen to be wrong before torch is imported."""
    from hvd_transformer.config import check_words

    check_words(settings)
    options.check_checkpoint(checkpoint)


def _as_text(result: "Result", num_ranks: int) -> str:
    from hvd_transformer.tasks.metrics import show_metrics

    shown = show_metrics(result.split, {f"{result.split}_{name}": value for name, value in result.metrics.items()})
    of = [f"{result.count:,} {result.unit}", "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"]
    of += [f"left out: {number:,} {reason}" for reason, number in result.left_out.items()]
    return "\n".join([f"{shown} ({', '.join(of)})", *result.notes])


def _as_json(result: "Result", num_ranks: int) -> str:
    return json.dumps(
        {
            "checkpoint": str(result.folder),
            "data": result.source,
            "split": result.split,
            "metrics": {name: value if abs(value) < float("inf") else None for name, value in result.metrics.items()},
            "count": result.count,
            "unit": result.unit,
            "left_out": result.left_out,
            "eval_samples": result.eval_samples,
            "ranks": num_ranks,
        },
        ensure_ascii=False,
    )

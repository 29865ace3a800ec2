"""The costs of a run by its steps, a line of metrics each: writing the lines, the report, opening them to resume."""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.growth.fit import Point
from benchmarks.growth.stopwatch import seconds
from hvd_transformer.reporting.metrics_log import MetricsLog
from hvd_transformer.reporting.run_report import write_report


def steps(number: int) -> dict[str, Point]:
    """Of a run of so many steps, logged each, and validated a hundred times."""
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        write_lines(Path(name) / "warm", 100)
        write_report(Path(name) / "warm")  # imports and fonts
        run = Path(name) / "run"
        found = {
            "log": seconds(lambda: write_lines(run, number)),
            "report": seconds(lambda: write_report(run)),
            # The last checkpoint is a tenth of the run before its end: the lines after it go.
            "resume": seconds(lambda: MetricsLog(run, number - number // 10, warn).close()),
        }
        return {name: Point(number, [value]) for name, value in found.items()}


def write_lines(run: Path, number: int) -> None:
    """What `Session` writes."""
    run.mkdir()
    log = MetricsLog(run, 0, warn)
    losses = (8 * np.arange(1, number + 1) ** -0.2 + np.random.default_rng(0).normal(0, 0.1, number)).tolist()
    for step, loss in enumerate(losses, start=1):
        log.write(
            step,
            epoch=1 + step // 1000,
            samples=24 * step,
            loss=loss,
            perplexity=float(np.exp(loss)),
            lr=1e-3 / step**0.5,
            grad_norm=abs(loss) / 3,
            tokens_per_second=1000.0 + loss,
            milliseconds_per_step=10.0 + loss,
            loss_scale=1.0,
        )
        if step % max(1, number // 100) == 0:
            log.write(step, epoch=1 + step // 1000, valid_loss=loss, valid_perplexity=float(np.exp(loss)))
    log.close()


def warn(text: str) -> None:
    """A disk that is full ends the measurement."""
    raise OSError(text)

"""A rank that reads each step when the next one is queued, as on GPUs."""

import os
import signal
import sys
from unittest.mock import patch

from hvd_transformer.cli.train import main
from hvd_transformer.training import trainer
from hvd_transformer.training.trainer import Trainer


def train(words: list[str], stopped: int | None = None) -> tuple[int, list[str]]:
    """hvd-train; the rank `stopped` gets SIGTERM in its seventh step. Returns the exit code, and the order of steps."""
    order: list[str] = []
    queue = Trainer.queue

    def noted(job: Trainer, *given, **options):
        if job.state.step == 6 and job.world.rank == stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        step = queue(job, *given, **options)
        order.append(f"q{job.state.step}")
        result = step.result
        step.result = lambda: (order.append(f"r{step._index + 1}"), result())[1]
        return step

    sys.argv = ["hvd-train", *words]
    with patch.object(trainer, "has_streams", lambda device: True), patch.object(Trainer, "queue", noted):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), order
    return 0, order

"""A language modelling task whose steps take a while without using a core, so that faults hit many of them."""

import os
import time
from pathlib import Path

from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.tasks.task import Batch

# `launch` passes on what begins with HOROVOD_.
SECONDS = float(os.environ.get("HOROVOD_TEST_PACE", "0"))
WHILE = Path(os.environ.get("HOROVOD_TEST_PACE_WHILE", "/"))  # without this file, steps take no longer than they must


class PacedTask(LanguageModelTask):
    def micro_batch(self, batch: Batch) -> MicroBatch:
        if WHILE.exists():
            time.sleep(SECONDS)
        return super().micro_batch(batch)

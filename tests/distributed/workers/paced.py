"""A language modelling task whose steps take a while without using a core, so that faults hit many of them."""

import os
import time

from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.tasks.task import Batch

SECONDS = float(os.environ.get("HOROVOD_TEST_PACE", "0"))  # `launch` passes on what begins with HOROVOD_


class PacedTask(LanguageModelTask):
    def micro_batch(self, batch: Batch) -> MicroBatch:
        time.sleep(SECONDS)
        return super().micro_batch(batch)

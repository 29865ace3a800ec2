"""Runs `hvd-train` for every list of settings of a JSON file, one after the other in one world: many_runs.py FILE.

With RECORD_UNITS in the environment each rank notes there the units of data that it takes: lines "EPOCH UNIT".
"""

import json
import os
import sys
from pathlib import Path

from hvd_transformer.comm.horovod_env import launched
from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.parallel.mesh import process_groups
from hvd_transformer.reporting import run_report
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.training import train_job
from hvd_transformer.training.process import StopRequest


def record_units(output_dir: str, rank: int) -> None:
    """Every call of `batch` from now on adds to OUTPUT_DIR/../units-NAME-RANK."""
    run = Path(output_dir)
    file = run.with_name(f"units-{run.name}-{rank}")
    original = ORIGINAL_BATCH

    def batch(task, epoch, units):
        with file.open("a", encoding="utf-8") as opened:
            opened.writelines(f"{epoch} {unit}\n" for unit in units)
        return original(task, epoch, units)

    LanguageModelTask.batch = batch


ORIGINAL_BATCH = LanguageModelTask.batch


def main() -> None:
    run_report.write_report = lambda run: run  # its charts take longer than these runs; test_run_directory.py has them
    configs = [load(overrides=words) for words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))]
    sizes = sorted({config.parallel.tensor for config in configs})
    groups = {tuple(group): group for tensor in sizes for group in process_groups(launched().size, tensor)}
    stop, world = StopRequest(), World.start(groups=list(groups.values()))
    for config in configs:
        if "RECORD_UNITS" in os.environ:
            record_units(config.output_dir, world.rank)
        train_job.run(config, world, stop)
    world.close()


if __name__ == "__main__":
    main()

"""`hvd-train` in a world that is there already; each rank notes the units of data that it takes."""

from pathlib import Path
from unittest.mock import patch

from hvd_transformer.comm.horovod_env import launched
from hvd_transformer.tasks.language_model_task import LanguageModelTask


def train(output_dir: str, words: list[str]) -> None:
    """Every call of `batch` adds lines "EPOCH UNIT" to OUTPUT_DIR/../units-NAME-RANK."""
    from commands import command

    run = Path(output_dir)
    file, original = run.with_name(f"units-{run.name}-{launched().rank}"), LanguageModelTask.batch

    def batch(task, epoch, units):
        with file.open("a", encoding="utf-8") as opened:
            opened.writelines(f"{epoch} {unit}\n" for unit in units)
        return original(task, epoch, units)

    with patch.object(LanguageModelTask, "batch", batch):
        done = command("hvd-train", f"output_dir={output_dir}", *words)
    assert done.returncode == 0, done.stdout + done.stderr

"""`hvd-transformer evaluate` on a run with a task of one's own: whose code runs, and only if it is allowed."""

import json
from pathlib import Path

import pytest
from commands import Done, command
from test_using import SMALL, sentences

from hvd_transformer.service.submitting.code_snapshot import collect, install, save

TASK = "counted:CountedTask"
CODE = """
import values
from hvd_transformer.tasks.language_model_task import LanguageModelTask

class CountedTask(LanguageModelTask):
    def metrics(self, sums, count):
        return {**super().metrics(sums, count), "code": values.CODE}
"""


def _write(folder: Path, value: float) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "counted.py").write_text(CODE)
    (folder / "values.py").write_text(f"CODE = {value}")


def _evaluate(folder: Path, *words: object) -> Done:
    return command("hvd-transformer", "evaluate", *words, folder=folder, hide=("horovod", "mpi4py"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the user's modules, which have changed since they made the runs `submitted` and `plain`."""
    folder = tmp_path_factory.mktemp("own") / "project"
    _write(folder, 1.0)
    (folder / "text.txt").write_text("".join(" ".join(row) + "\n" for row in sentences(300)))
    for name in ("submitted", "plain"):
        words = [f"task={TASK}", f"data.source={folder / 'text.txt'}", f"output_dir=runs/{name}"]
        words += ["training.max_steps=2", "training.epochs=1", "data.split=[0.9, 0.1]"]
        words += [f"data.cache_dir={folder / 'cache'}"]
        done = command("hvd-train", *SMALL, *words, folder=folder, hide=("horovod", "mpi4py"))
        assert done.returncode == 0, done.stdout + done.stderr
    kept = save(collect(folder, [("task", TASK)]), folder / "state")  # as `submit` does
    install(folder / "state" / kept, folder / "runs" / "submitted")  # as the start of the job does
    _write(folder, 2.0)
    return folder


@pytest.mark.parametrize("checkpoint", ["submitted", "submitted/checkpoints/latest"])
def test_the_kept_code_runs_in_any_folder(project: Path, tmp_path: Path, checkpoint: str) -> None:
    _write(tmp_path / "other", 3.0)
    path = project / "runs" / checkpoint
    for folder in (project, tmp_path, tmp_path / "other"):
        done = _evaluate(folder, path, "--kept-code", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["metrics"]["code"] == 1.0
        code = project / "runs" / "submitted" / ".code"
        assert f"task={TASK}: the code that was kept with the run, {code}\n" in done.stderr


def test_the_current_code_runs_if_the_task_is_trusted(project: Path, tmp_path: Path) -> None:
    done = _evaluate(project, "runs/submitted", "--trust-task", "--json")
    assert json.loads(done.stdout)["metrics"]["code"] == 2.0
    assert f"task={TASK}: the current code; --kept-code takes what was kept with the run\n" in done.stderr
    done = _evaluate(project, "runs/plain", "--trust-task", "--json")
    assert json.loads(done.stdout)["metrics"]["code"] == 2.0
    assert "kept" not in done.stderr
    assert "No module named 'counted'" in _evaluate(tmp_path, project / "runs" / "submitted", "--trust-task").stderr


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        (
            "submitted",
            [],
            f"task={TASK}: the checkpoint names this class; --trust-task imports it, which runs its code; "
            "--kept-code does so with the code that was kept with the run",
        ),
        ("plain", [], f"task={TASK}: the checkpoint names this class; --trust-task imports it, which runs its code"),
        ("plain", ["--kept-code"], "--kept-code: runs/plain has no code of a job that was submitted to the service"),
    ],
)
def test_nothing_runs_without_being_asked_for(project: Path, run: str, words: list[str], message: str) -> None:
    done = _evaluate(project, f"runs/{run}", *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"hvd-transformer: {message}\n")

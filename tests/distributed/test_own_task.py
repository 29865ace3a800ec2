"""The task of docs/own-task.md, as a reader would save and run it."""

import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from commands import command
from conftest import REPOSITORY, rank_environment
from jobs import summary, tiny

pytestmark = pytest.mark.distributed
PAGE = (REPOSITORY / "docs" / "own-task.md").read_text(encoding="utf-8")
SMALL = [word for word in tiny(Path("unused")) if not word.startswith("data.")]
SMALL += ["training.epochs=6", "training.best_metric=loss", "training.precision=fp64"]
SMALL += ["optimizer.lr_scaling=none", "training.global_batch_size=16"]


def test_the_page_s_task_learns_on_one_rank_and_on_two(ranks, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "vowels.py").write_text(code)
    rng = random.Random(1)
    words = ["".join(rng.choices("aeioubcdfghklmnprst", k=rng.randint(1, 9))) for _ in range(400)]
    (tmp_path / "words.txt").write_text(" ".join(words))
    one, two = (shlex.split(line) for line in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)[0].splitlines())
    runs = {
        "one": command(*one, "output_dir=runs/one", *SMALL, folder=tmp_path),
        "two": subprocess.run(
            [*two, *SMALL], cwd=tmp_path, env=rank_environment(), capture_output=True, text=True, timeout=120
        ),
    }
    for name, done in runs.items():
        assert done.returncode == 0, done.stdout + done.stderr
        assert "360 words" in done.stdout
        assert "letters/s" in done.stdout
        assert summary(tmp_path / "runs" / name)["valid_accuracy"] > 0.95
    one, other = (summary(tmp_path / "runs" / name) for name in runs)
    assert other["world"] == other["pp"] == 2
    assert other["valid_loss"] == pytest.approx(one["valid_loss"], rel=1e-9)  # whatever the ranks and stages
    # What it was trained on can be evaluated, and nothing else.
    evaluate = ["hvd-transformer", "evaluate", "runs/one"]
    assert "the checkpoint names this class; --trust-task imports it" in said(tmp_path, evaluate, 2)
    evaluate.append("--trust-task")
    assert f"valid loss {one['valid_loss']:.4f}, accuracy {one['valid_accuracy']:.4f}" in said(tmp_path, evaluate, 0)
    assert "does not implement `prepare_evaluation`" in said(tmp_path, [*evaluate, "--data", "words.txt"], 2)
    assert "no test split; there is valid" in said(tmp_path, [*evaluate, "--split", "test"], 2)
    (tmp_path / "words.txt").write_text("other words")
    assert "is not the data that the checkpoint was trained on" in said(tmp_path, evaluate, 2)


def said(folder, words, code):
    done = command(*words, folder=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr

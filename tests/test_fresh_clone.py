"""What a new reader does first: `make train` in a fresh clone, here one whose path has a space."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, REPOSITORY


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_make_train_in_a_fresh_clone(tmp_path: Path) -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    clone = tmp_path / "a clone"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
    if (data := REPOSITORY.parent / "shared").exists():
        (tmp_path / "shared").symlink_to(data)
    own = ("PYTHONPATH", "VIRTUAL_ENV", "MAKE", "HOROVOD_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder).resolve() != BIN.resolve()]
    environment["PATH"] = os.pathsep.join(folders)
    done = subprocess.run(["make", "train"], cwd=clone, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((clone / "runs" / "python-docs" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["world"], summary["steps"]) == ("finished", 2, 480)
    lines = (clone / "runs" / "python-docs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]

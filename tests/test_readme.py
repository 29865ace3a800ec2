"""Runs every command of the README and the guide, in order, as a reader would."""

import json
import shutil
import subprocess

import pytest
from conftest import REPOSITORY, rank_environment
from huggingface import write_bert
from pages import RUN, TEXT, commands


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_every_command_works_in_the_guide_s_order(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    pytest.importorskip("transformers", reason="needs transformers")
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    write_bert(tmp_path / "my-bert")  # what a reader has
    environment = {**rank_environment(), "HOME": str(tmp_path)}
    ran = []
    for page in RUN:
        for command in commands(page):
            if command.startswith("make"):
                continue
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
            )
            assert done.returncode == 0, f"{page}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            ran.append(command)
    assert len(ran) > 25
    summaries = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json")}
    assert {name: summary["world"] for name, summary in summaries.items()} == {
        "alone": 1, "gloo": 2, "mpi": 2, "mpirun": 2, "launch": 2, "readme": 1, "again": 1, "shared": 2, "sharded": 2,
        "pairs": 2, "rows": 1, "tuned": 2,
    }  # fmt: skip
    assert (summaries["shared"]["dp"], summaries["shared"]["tp"]) == (1, 2)
    assert summaries["sharded"]["dp"] == 2
    assert summaries["gloo"]["steps"] == 40  # its second command resumed
    assert summaries["readme"]["test_loss" if "test_loss" in summaries["readme"] else "valid_loss"] > 0


def test_the_two_commands_are_targets_that_do_what_the_readme_says():
    """Without running them in themselves: what make would do."""
    assert [command for command in commands("README.md") if command.startswith("make")] == ["make train", "make test"]
    planned = {
        target: subprocess.run(
            ["make", "--dry-run", "--always-make", target], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout
        for target in ("train", "test")
    }
    assert "horovodrun -np 2 -H localhost:2 hvd-train --preset python-docs" in planned["train"]
    assert "pytest" in planned["test"]
    for plan in planned.values():
        assert "build_horovod.sh" in plan
        assert "constraints.txt" in plan


def test_the_readme_is_short_and_says_what_has_not_run():
    readme = TEXT["README.md"]
    assert readme.count("\n") <= 220
    table = readme.split("## What has run where")[1].split("\n## ")[0]
    for name in ("GPU", "NCCL", "Slurm", "Kubernetes"):
        (row,) = (line for line in table.splitlines() if line.startswith(f"| {name}"))
        assert "**not run**" in row

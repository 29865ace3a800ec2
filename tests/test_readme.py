"""Runs every command of the README, in its order, as a reader would."""

import json
import re
import shutil
import subprocess

import pytest
from conftest import REPOSITORY, rank_environment
from huggingface import write_bert

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_every_command_works_in_the_readme_s_order(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    pytest.importorskip("transformers", reason="needs transformers")
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    write_bert(tmp_path / "my-bert")  # what a reader has
    environment = {**rank_environment(), "HOME": str(tmp_path)}
    ran = []
    for command in COMMANDS:
        if command.startswith("make"):
            continue
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        ran.append(command)
    assert len(ran) > 8
    summaries = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json")}
    assert {name: summary["world"] for name, summary in summaries.items()} == {
        "alone": 1, "gloo": 2, "mpi": 2, "mpirun": 2, "launch": 2, "readme": 1, "again": 1, "shared": 2, "sharded": 2,
        "pairs": 2, "rows": 1, "tuned": 2,
    }  # fmt: skip
    assert (summaries["shared"]["dp"], summaries["shared"]["tp"]) == (1, 2)
    assert summaries["sharded"]["dp"] == 2
    assert summaries["gloo"]["steps"] == 40  # its second command went on
    assert summaries["readme"]["test_loss" if "test_loss" in summaries["readme"] else "valid_loss"] > 0


def test_the_two_commands_are_targets_that_do_what_the_readme_says():
    """Without running them in themselves: what make would do."""
    assert [command for command in COMMANDS if command.startswith("make")] == ["make train", "make test"]
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


def test_every_file_and_folder_that_the_readme_names_is_there():
    linked = re.findall(r"\]\(([^)#:]+)\)", README)
    assert linked
    for name in [*linked, "hvd_transformer/comm/horovod_env.py", "hvd_transformer/launch/horovodrun_command.py"]:
        assert (REPOSITORY / name).exists(), name
    tree = README.split("### The code")[1].split("```")[1]
    rooms = re.findall(r"^  (\w+)/", tree, re.MULTILINE)
    here = {path.name for path in (REPOSITORY / "hvd_transformer").iterdir() if (path / "__init__.py").exists()}
    assert set(rooms) == here


def test_the_presets_of_the_readme_are_the_presets():
    table = README.split("| preset | what |")[1].split("\n\n")[0]
    presets = {path.stem for path in (REPOSITORY / "hvd_transformer" / "config" / "presets").iterdir()}
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == presets

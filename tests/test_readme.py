"""Runs every command of the README, in its order, and looks at what each gives."""

import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import command
from conftest import REPOSITORY, rank_environment
from huggingface import write_bert

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


# The same over MPI, and what tests/distributed tries in a shorter way.
LONG = ("--mpi ", "mpirun -np 2", "output_dir=runs/sharded")
# They start processes themselves, on every rank or host.
LAUNCHERS = ("horovodrun", "mpirun", "hvd-transformer launch", "hvd-transformer doctor")


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of the README: what is ours and alone in this process, the rest as a shell runs it."""
    if line.startswith("hvd-") and not line.startswith(LAUNCHERS):
        return command(*shlex.split(line), folder=folder, environment={"HOME": str(folder)})
    environment = {**rank_environment(), "HOME": str(folder)}
    return subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("left_out", [LONG, pytest.param((), marks=pytest.mark.slow)], ids=["most", "all"])
def test_every_command_works_in_the_readme_s_order(tmp_path, left_out):
    pytest.importorskip("horovod", reason="needs Horovod")
    pytest.importorskip("transformers", reason="needs transformers")
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    write_bert(tmp_path / "my-bert")  # what a reader has
    told = {}
    for line in COMMANDS:
        if line.startswith("make") or any(word in line for word in left_out):
            continue
        done = run(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        told[line] = done.stdout
    assert len(told) > 20
    runs = {}
    for line in told:
        if (name := re.search(r"output_dir=runs/(\S+)", line)) and not re.search("--dry-run|plan|doctor", line):
            runs[name[1]] = int(re.search(r"-np (\d+)|$", line)[1] or 1)
    summaries = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json")}
    assert {name: summary["world"] for name, summary in summaries.items()} == runs
    check_runs(tmp_path / "runs", summaries)
    check_answers(tmp_path, told, summaries)


def check_runs(runs: Path, summaries: dict[str, dict]) -> None:
    """However two ranks were started, and who updates which weights, they train the same."""
    losses = {}
    for name in summaries:
        lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if "loss" in line]
        assert all(map(math.isfinite, losses[name])), name
    assert summaries["gloo"]["steps"] == 40  # its second command went on
    for name in {"mpi", "mpirun", "launch", "sharded"} & summaries.keys():
        assert losses[name] == pytest.approx(losses["gloo"][: len(losses[name])], rel=1e-5), name
    assert losses["again"] == losses["readme"]
    for name in ("alone", "gloo", "readme", "pairs", "rows"):
        assert losses[name][-1] < losses[name][0], name


def check_answers(folder: Path, told: dict[str, str], summaries: dict[str, dict]) -> None:
    """What the commands that train nothing give."""

    def answer(words: str) -> str:
        (found,) = (text for line, text in told.items() if words in line)
        return found

    assert answer("hvd-transformer translate").count("\n") == 1
    label = json.loads(answer("hvd-transformer classify"))
    assert label["label"] == max(label["probabilities"], key=label["probabilities"].get) in ("even", "odd")
    assert answer("hvd-transformer generate").startswith("The ")
    assert answer("hvd-transformer evaluate").splitlines()[-1].startswith("data loss ")
    (line,) = (line for line in answer("-- evaluate runs/pairs").splitlines() if line.startswith("{"))
    evaluated = json.loads(line)
    assert evaluated["metrics"]["loss"] == pytest.approx(summaries["pairs"]["valid_loss"], rel=1e-5)
    for name in ("exported", "tuned"):
        assert (folder / name / "model.safetensors").stat().st_size > 0
    assert "[KEY=VALUE ...]" in answer("hvd-train --help")
    assert "node01" in answer("--dry-run") and "hvd-train" in answer("--dry-run")
    assert (folder / "schedules.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "runs/gloo/report.html").exists()
    assert "report.html" in answer("hvd-transformer report")


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

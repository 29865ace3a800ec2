"""Runs every command of the README and the guide, in order, as a reader would, and looks at what each gives."""

import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from chats import write_chat_model
from commands import command
from conftest import REPOSITORY, rank_environment
from huggingface import write_bert
from pages import RUN, TEXT
from pages import commands as commands_of

# The same over MPI, and what tests/distributed tries in a shorter way.
LONG = ("--mpi ", "mpirun -np 2", "output_dir=runs/sharded", " bench ")
# They start processes themselves, on every rank or host.
LAUNCHERS = ("horovodrun", "mpirun", "hvd-transformer launch", "hvd-transformer doctor")


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of a page: our own commands on one rank run in this process, the rest in a shell."""
    if line.startswith("hvd-") and not line.startswith(LAUNCHERS) and ">" not in line:
        return command(*shlex.split(line), folder=folder, environment={"HOME": str(folder)})
    environment = {**rank_environment(), "HOME": str(folder)}
    return subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("left_out", [LONG, pytest.param((), marks=pytest.mark.slow)], ids=["most", "all"])
def test_every_command_works_in_the_guide_s_order(tmp_path, left_out):
    pytest.importorskip("horovod", reason="needs Horovod")
    pytest.importorskip("transformers", reason="needs transformers")
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    write_bert(tmp_path / "my-bert")  # what a reader has
    write_chat_model(tmp_path / "my-chat-model")
    told = {}
    for page in RUN:
        for line in commands_of(page):
            if line.startswith("make") or any(word in line for word in left_out):
                continue
            done = run(line, tmp_path)
            assert done.returncode == 0, f"{page}: {line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
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
    assert answer("generate runs/readme").startswith("The ")
    assert answer("evaluate runs/rows").splitlines()[-1].startswith("data loss ")
    (line,) = (line for line in answer("-- evaluate runs/pairs").splitlines() if line.startswith("{"))
    evaluated = json.loads(line)
    assert evaluated["metrics"]["loss"] == pytest.approx(summaries["pairs"]["valid_loss"], rel=1e-5)
    assert (folder / "adapters" / "adapter_model.safetensors").stat().st_size > 0
    for name in ("exported", "tuned", "merged"):
        assert (folder / name / "model.safetensors").stat().st_size > 0
    assert "[KEY=VALUE]..." in answer("hvd-train --help")
    assert "node01" in answer("--dry-run") and "hvd-train" in answer("--dry-run")
    assert (folder / "schedules.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "runs/gloo/report.html").exists()
    assert "report.html" in answer("hvd-transformer report")
    assert "training.max_steps" in answer("config diff runs/alone runs/job")
    assert json.loads(answer("config diff runs/alone/checkpoints/latest"))["differs"]["training.max_steps"] == [20, 10]
    assert "optimizer" in json.loads((folder / "hvd-train.schema.json").read_text())["properties"]


def test_the_two_commands_are_targets_that_do_what_the_readme_says():
    """Without running them in themselves: what make would do."""
    assert [command for command in commands_of("README.md") if command.startswith("make")] == [
        "make train",
        "make test",
    ]
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


def test_the_readme_is_short_and_says_what_is_not_tested():
    readme = TEXT["README.md"]
    assert readme.count("\n") <= 220
    table = readme.split("## What has run where")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]

    def row(start: str) -> str:
        (found,) = (line for line in rows if line.startswith(f"| {start}"))
        return found

    for start in ("CPU, gloo", "CPU, MPI", "Two hosts", "Docker, CPU image", "Slurm", "One GPU"):
        assert "**not " not in row(start)
    for start in ("Kubernetes", "Several GPUs", "NCCL"):
        assert "**not tested**" in row(start)
    assert "**not built**" in row("Docker, GPU image")

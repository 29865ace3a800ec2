"""The goals of training on one GPU, judged by the figures that a card once gave, and by worse ones."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_goals import REPOSITORY, judge, run_tests

FIGURES = REPOSITORY / "benchmarks" / "results" / "gpu.json"
EAGER, COMPILED = "llama-1b, 16k tokens, eager", "tutorial-1b, 8k tokens, compiled"


@pytest.fixture
def figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return found


def test_what_a_card_once_reached(figures: dict[str, Any]) -> None:
    goals = judge(figures)
    assert [goal.reached for goal in goals] == [True, True, True]
    assert [goal.found.partition(" ")[0] for goal in goals] == ["53.9%", "60.5%", "5.8%"]  # as in RESULTS.md
    assert "llama-1b, 8k tokens, eager" in goals[0].found


def slower(figures: dict[str, Any]) -> None:
    figures[EAGER]["seconds"] = [2 * seconds for seconds in figures[EAGER]["seconds"]]


def fails(figures: dict[str, Any]) -> None:
    figures[COMPILED] = {"failed": "out of memory"}


def needs_less(figures: dict[str, Any]) -> None:
    figures[EAGER]["peak_memory"] *= 0.8


def without_plan(figures: dict[str, Any]) -> None:
    figures[COMPILED].update(flops=float("nan"), memory=float("nan"))


@pytest.mark.parametrize(
    ("change", "reached", "case"),
    [
        (slower, [False, True, True], EAGER),
        (fails, [True, False, False], COMPILED),
        (needs_less, [True, True, False], EAGER),
        (without_plan, [True, False, False], COMPILED),
    ],
)
def test_a_goal_that_is_missed_names_its_case(
    figures: dict[str, Any], change: Callable[[dict[str, Any]], None], reached: list[bool], case: str
) -> None:
    change(figures)
    goals = judge(figures)
    assert [goal.reached for goal in goals] == reached
    assert all((case in goal.found and str(goal).startswith("MISSED ")) != goal.reached for goal in goals)


def test_a_part_is_judged_by_what_it_has(figures: dict[str, Any]) -> None:
    small = {name: figures[name] for name in ("matmul", "device")}
    assert judge(small) == []
    assert len(judge({**small, EAGER: figures[EAGER]})) == 2


@pytest.mark.parametrize(
    ("code", "last", "reached"),
    [
        (0, "76 passed, 31 skipped in 300.00s", True),
        (1, "1 failed, 75 passed in 9.00s", False),
        (0, "107 skipped", False),
    ],
)
def test_tests_are_a_goal(
    code: int, last: str, reached: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        assert command[:3] == [sys.executable, "-m", "pytest"] and Path(options["cwd"], command[-1]).is_dir()
        return subprocess.CompletedProcess(command, code, f"....\n{last}\n")

    monkeypatch.setattr(subprocess, "run", run)
    goal = run_tests(9)
    assert goal.reached is reached and goal.found == last
    assert "....\n" in capfd.readouterr().out


def test_tests_end_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\necho begun\nexec sleep 60\n")
    endless.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(endless))
    goal = run_tests(1.0)
    assert not goal.reached and goal.found == "not ended after 1 s"
    assert "begun" in capfd.readouterr().out

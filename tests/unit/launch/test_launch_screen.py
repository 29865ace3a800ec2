"""The live view at the bottom of a launched job's terminal."""

import io

import pytest
from rich.console import Console

from hvd_transformer.launch.agents import Beat
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.output.launch_screen import Screen, _View


def shown(beats: dict[int, Beat]) -> list[str]:
    view = _View([Host("h1", 2), Host("h2", 1)], "")
    view.beats = beats
    console = Console(file=io.StringIO(), width=100)
    console.print(view)
    return console.file.getvalue().splitlines()


def test_mfu_is_shown_where_it_is_known() -> None:
    beat = {"rank": 0, "step": 5, "total_steps": 20, "loss": 2.5, "age": 0.1, "phase": "forward", "mfu": 0.4312}
    _, numbers, *_ = shown({0: {**beat, "tokens_per_second": 12345.6, "unit": "tokens"}})
    assert numbers.strip() == "loss 2.500  12,346 tokens/s  MFU 43.1 %  3 ranks on 2 hosts"


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_the_speed_is_in_what_the_task_counts(unit: str) -> None:
    beat = {"rank": 0, "step": 5, "total_steps": 20, "loss": 2.5, "age": 0.1, "phase": "forward"}
    progress, numbers, *hosts = shown({0: {**beat, "tokens_per_second": 12345.6, "unit": unit}})
    assert progress.startswith("step 5/20") and " 25% " in progress
    assert numbers.strip() == f"loss 2.500  12,346 {unit}/s  3 ranks on 2 hosts"
    assert [line.split() for line in hosts] == [["h1", "ranks", "0–1", "forward"], ["h2", "rank", "2", "starting"]]


def test_before_the_first_step_there_is_no_speed() -> None:
    beat = {"rank": 0, "step": 0, "total_steps": 0, "loss": None, "age": 0.1, "phase": "start"}
    progress, numbers, *_ = shown({0: {**beat, "tokens_per_second": None, "unit": "tokens"}})
    assert progress.startswith("starting")
    assert numbers.strip() == "3 ranks on 2 hosts"


def test_a_terminal_without_some_characters_shows_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1"))
    Screen().show(0, "out", "café \ufffd 日\n")
    assert written.getvalue().decode("latin-1") == "café \\ufffd \\u65e5\n"

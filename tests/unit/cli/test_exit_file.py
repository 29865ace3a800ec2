"""How a launcher ended is in the file that its starter named, whatever the end."""

import json
import os
from pathlib import Path

import click
import pytest

from hvd_transformer.cli.exit_file import ExitFile
from hvd_transformer.cli.launch import launch
from hvd_transformer.errors import UserError

NOTHING = {"cause": "", "stopped": None, "restarts": 0, "step": None, "hosts": [], "refused": {}, "lost": []}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HVD_TRANSFORMER_EXIT_FILE", str(tmp_path / "1.exit"))
    return tmp_path / "1.exit"


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (None, 0, ""),
        (SystemExit(0), 0, ""),
        (SystemExit(None), 0, ""),
        (SystemExit(75), 75, ""),
        (UserError("-np 3: no"), 2, "-np 3: no"),
        (click.UsageError("no such option"), 2, "no such option"),
        (KeyboardInterrupt(), 1, "interrupted"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
    ],
)
def test_every_end_has_a_code_and_a_cause(file: Path, error: BaseException | None, code: int, cause: str) -> None:
    try:
        with ExitFile():
            assert "HVD_TRANSFORMER_EXIT_FILE" not in os.environ  # no rank and no other launcher may write it
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert json.loads(file.read_text()) == {**NOTHING, "code": code, "cause": cause}


def test_what_the_supervisor_knows_is_told_with_it(file: Path) -> None:
    how = {**NOTHING, "cause": "host h2 is lost", "restarts": 3, "step": 70, "hosts": ["h1"], "lost": ["h2"]}
    with pytest.raises(SystemExit), ExitFile() as exit_file:
        exit_file.watch(lambda: how)
        raise SystemExit(1)
    assert json.loads(file.read_text()) == {"code": 1, **how}


def test_nothing_is_written_for_nobody_or_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVD_TRANSFORMER_EXIT_FILE", raising=False)
    with ExitFile():
        pass
    monkeypatch.setenv("HVD_TRANSFORMER_EXIT_FILE", str(tmp_path / "missing" / "1.exit"))
    with pytest.raises(SystemExit), ExitFile():
        raise SystemExit(3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["-np", "0"], "-np 0: must be at least 1"),
        (["-np", "1", "--", "model.num_layers=x"], "model.num_layers=x"),
        (["-np", "1", "--hostfile", "/no/such"], "/no/such: cannot be read: No such file or directory"),
        (["-np", "1", "--", "--no-such-option"], "No such option"),
    ],
)
def test_a_refused_command_line_is_told_before_anything_starts(file: Path, words: list[str], cause: str) -> None:
    with pytest.raises((UserError, click.ClickException)):
        launch.main(words, standalone_mode=False)
    told = json.loads(file.read_text())
    assert cause in told.pop("cause")
    assert told == {**{name: value for name, value in NOTHING.items() if name != "cause"}, "code": 2}

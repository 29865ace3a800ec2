"""The commands of schedulers: what they print, and all that can be wrong with them, in one line."""

import threading
from pathlib import Path

import pytest

from hvd_transformer.service.engines.backend import EngineFault
from hvd_transformer.service.engines.commands import CommandFailed, Commands


def test_a_command_gets_its_input_and_its_environment(tmp_path: Path) -> None:
    script = 'read line; echo "$line $WORD $LC_ALL $(pwd)"'
    printed = Commands().run("sh", "-c", script, text="hello\n", env={"WORD": "there"}, cwd=str(tmp_path))
    assert printed == f"hello there C {tmp_path}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("no-such-command",), "no-such-command: No such file or directory"),
        (("sh", "-c", "echo first >&2; echo '  the   last ' >&2; exit 3"), "sh: the last"),
        (("sh", "-c", "exit 3"), "sh: exit code 3"),
        (("sh", "-c", "x" * (1 << 18)), "sh: Argument list too long"),
        (("sh", "-c", "sleep 100 & wait"), "sh: did not end within 0.1 s"),
    ],
)
def test_faults(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(EngineFault) as raised:
        Commands(seconds=0.1 if "wait" in words[-1] else 60.0).run(*words)
    assert str(raised.value) == line


def test_what_is_too_long_for_a_command_is_no_fault_of_the_scheduler() -> None:
    with pytest.raises(CommandFailed, match="too long"):
        Commands().run("true", env={"WORD": "x" * (1 << 18)})


def test_close_ends_the_command_that_runs(tmp_path: Path) -> None:
    commands, ready = Commands(), tmp_path / "ready"
    faults: list[Exception] = []

    def run() -> None:
        try:
            commands.run("sh", "-c", f"mkfifo {ready}; echo >{ready}; sleep 100 & wait")
        except CommandFailed as fault:
            faults.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    while not ready.exists():
        pass
    ready.read_text()
    commands.close()
    thread.join(60)
    assert [str(fault) for fault in faults] == ["sh: exit code -9"]
    with pytest.raises(EngineFault):
        commands.run("sh", "-c", "sleep 100 & wait")

"""The private folder on each host: who can read it, what travels through it, and that it goes with the launcher."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.launch.agents import HostAgents, Show
from hvd_transformer.launch.ssh import Ssh

VALUES = {"TOKEN": "line one\nline 'two' \"é\" $(x) \\"}
SLEEP = ["sh", "-c", "sleep 100"]


@pytest.fixture
def ssh_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for ssh: writes its arguments there, then runs the command here, as a server's shell would."""
    commands, log = tmp_path / "bin", tmp_path / "ssh.log"
    commands.mkdir()
    script = f"""#!/bin/sh
printf '%s\\n' "$@" >>{log}
for last; do :; done
case "$*" in *refused*) echo 'Permission denied (publickey).' >&2; exit 255;; esac
exec sh -c "$last"
"""
    (commands / "ssh").write_text(script)
    (commands / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return log


def start_rank(folder: HostAgents, rank: int, command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hvd_transformer.launch.rank_runner", folder.path, *command],
        env={**os.environ, "HOROVOD_RANK": str(rank)}, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def notes(folder: HostAgents) -> list[Path]:
    return list(Path(folder.path).glob("running-*"))


def opened(*hosts: str, show: Show = lambda *printed: None) -> HostAgents:
    folder = HostAgents(hosts, Ssh(), VALUES, dict(os.environ), show)
    try:
        folder.wait_ready()
    except UserError:
        folder.close()
        raise
    return folder


@pytest.mark.parametrize("hosts", [["localhost"], ["far.invalid"], ["localhost", "far.invalid"]])
def test_a_rank_gets_the_values_and_nobody_else_does(ssh_log: Path, hosts: list[str]) -> None:
    """These hosts share /tmp."""
    printed: list[tuple[int, str, str]] = []
    folder = opened(*hosts, show=lambda *what: printed.append(what))
    file = Path(folder.path) / "environment"
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    rank = start_rank(folder, 0, [sys.executable, "-c", "import json, os; print(json.dumps(os.environ['TOKEN']))"])
    assert rank.wait(10) == 0
    assert folder.close() == []
    assert [(rank, stream, json.loads(text)) for rank, stream, text in printed] == [(0, "out", VALUES["TOKEN"])]
    assert not file.parent.exists()
    if ssh_log.exists():
        assert "line one" not in ssh_log.read_text()
        assert "StrictHostKeyChecking=accept-new" in ssh_log.read_text()
    assert ssh_log.exists() == ("far.invalid" in hosts)


def test_failures_come_back_in_the_order_of_time(ssh_log: Path) -> None:
    folder = opened("far.invalid", "other.invalid")
    for rank, end in ((2, "exit 5"), (0, "exit 0"), (1, "kill -9 $$"), (3, "exec /no/such/command")):
        assert start_rank(folder, rank, ["sh", "-c", end]).wait(10) == {2: 5, 0: 0, 1: 137, 3: 127}[rank]
    found = folder.close()
    assert [failure[1:] for failure in found] == [
        (rank, code, os.uname().nodename) for rank, code in ((2, 5), (1, 137), (3, 127))
    ]


def test_a_stop_reaches_ranks_that_run_and_ranks_that_start_later(ssh_log: Path) -> None:
    """A rank that has ended waits for the others: at the first exit code horovodrun would kill them."""
    folder = opened("far.invalid")
    first = start_rank(folder, 0, SLEEP)
    wait_until(lambda: folder.running)
    assert folder.stop() == 1
    wait_until(lambda: not notes(folder))
    second = start_rank(folder, 1, SLEEP)
    wait_until(lambda: len(folder.failures) == 2)
    assert (first.poll(), second.poll(), folder.stop()) == (None, None, 0)
    assert [failure.code for failure in folder.close()] == [128 + signal.SIGTERM] * 2
    assert (first.wait(10), second.wait(10)) == (128 + signal.SIGTERM,) * 2


def test_closing_ends_what_ignores_signals_with_all_its_children(ssh_log: Path) -> None:
    folder = opened("far.invalid")
    rank = start_rank(folder, 0, ["sh", "-c", "trap '' TERM; sleep 101 & sleep 102"])
    wait_until(lambda: notes(folder))
    group = json.loads(notes(folder)[0].read_text())["child"]
    assert folder.close() == []  # caused by the agent, not a failure of the rank
    assert rank.wait(10) == 137
    wait_until(lambda: not group_lives(group))


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_launcher_leaves_nothing(ssh_log: Path) -> None:
    source = (
        "import os, sys; from hvd_transformer.launch.ssh import Ssh; "
        "from hvd_transformer.launch.agents import HostAgents; "
        "folder = HostAgents(['localhost', 'far.invalid'], Ssh(), {}, dict(os.environ)); folder.wait_ready(); "
        "print(folder.path, flush=True); "
        "sys.stdin.read()"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout
    folder = Path(launcher.stdout.readline().strip())
    assert folder.is_dir()
    rank = subprocess.Popen([sys.executable, "-m", "hvd_transformer.launch.rank_runner", folder, *SLEEP])
    wait_until(lambda: list(folder.glob("running-*")))
    launcher.kill()
    assert rank.wait(10) == 128 + signal.SIGTERM
    wait_until(lambda: not folder.exists())


def test_a_host_that_cannot_be_reached_is_named_with_what_ssh_says(ssh_log: Path) -> None:
    with pytest.raises(UserError, match=r"^host refused.invalid: cannot be used: Permission denied \(publickey\)\.$"):
        opened("localhost", "far.invalid", "refused.invalid")
    assert not list(Path("/tmp").glob(f"hvd-transformer-{os.getpid()}-*"))


def test_what_a_killed_agent_left_is_removed_by_the_next_one(ssh_log: Path) -> None:
    """As after a crash of the host: nothing else would ever remove the ranks' environment."""
    left, used = opened("far.invalid"), opened("far.invalid", "other.invalid")
    for pid in agents_of(left.path):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: left.lost)
    os.kill(agents_of(used.path)[0], signal.SIGKILL)  # the other agent still uses it
    assert (Path(left.path) / "environment").exists()
    new = opened("far.invalid")
    assert not Path(left.path).exists()
    assert (Path(used.path) / "environment").exists()
    for folder in (left, used, new):
        folder.close()
    assert not any(Path(folder.path).exists() for folder in (left, used, new))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_what_another_user_put_beside_it_is_left_alone(ssh_log: Path) -> None:
    """Opening a named pipe would block forever."""
    trap = Path(f"/tmp/hvd-transformer-trap-{os.getpid()}")
    trap.mkdir(mode=0o755)
    try:
        os.mkfifo(trap / "keeper-h1-1")
        os.chown(trap, 54321, 54321)
        opened("far.invalid").close()
        assert (trap / "keeper-h1-1").exists()
    finally:
        shutil.rmtree(trap)


def agents_of(folder: str) -> list[int]:
    """The node agents of a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().decode().split("\0")
            if words[1:4] == ["-m", "hvd_transformer.launch.node_agent", folder]:
                found.append(int(file.parent.name))
    return found

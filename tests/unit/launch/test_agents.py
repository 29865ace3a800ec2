"""Node agents and their ranks: who sees what, how ranks end, and that nothing outlives the launcher or its agent."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.launch import connections as connections_module
from hvd_transformer.launch import host_connection
from hvd_transformer.launch.agents import HostAgents
from hvd_transformer.launch.connections import HostConnections
from hvd_transformer.launch.host_connection import NoConnection
from hvd_transformer.launch.ssh import Ssh

VALUES = {"TOKEN": "line one\nline 'two' \"é\" $(x) \\"}
SLEEP = ["sh", "-c", "sleep 100"]
WAYS = ["gloo", "mpi"]


@pytest.fixture
def ssh_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for ssh: writes its arguments there, then runs the command here, as a server's shell would."""
    commands, log = tmp_path / "bin", tmp_path / "ssh.log"
    commands.mkdir()
    script = f"""#!/bin/sh
printf '%s ' "$@" | tr '\\n' ' ' >>{log}; echo >>{log}
for last; do :; done
case "$*" in
*refused*) echo 'Permission denied (publickey).' >&2; exit 255;;
*busy*) [ $(grep -c busy {log}) -gt 2 ] || {{ echo 'kex_exchange_identification: Connection closed' >&2; exit 255; }};;
*noisy*) head -c 40000000 /dev/zero | tr '\\0' x >&2; echo >&2;;
*waits*) until [ -e {tmp_path}/go ]; do sleep 0.02; done;;
esac
exec sh -c "exec $last"
"""
    (commands / "ssh").write_text(script)
    (commands / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return log


def connections_opened(log: Path) -> int:
    """How many times ssh was started."""
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def pool(ssh_log: Path) -> Iterator[HostConnections]:
    with closing(HostConnections(Ssh(), dict(os.environ))) as made:
        yield made
    assert not folders(made)


def folders(pool: HostConnections) -> list[Path]:
    folder = Path(pool.folder)
    return sorted(folder.parent.glob(f"{folder.name}*"))


def ready(pool: HostConnections, *hosts: str) -> HostAgents:
    agents = HostAgents(hosts, pool)
    agents.begin(VALUES)
    agents.wait_ready()
    return agents


class Started:
    """A rank that was started over gloo by its agent, or as mpirun does by a runner."""

    def __init__(self, pool: HostConnections, agents: HostAgents, way: str, rank: int, command: Sequence[str]) -> None:
        self.runner: subprocess.Popen[bytes] | None = None
        if way == "mpi":
            words = [sys.executable, "-m", "hvd_transformer.launch.rank_runner", pool.folder, *command]
            self.runner = subprocess.Popen(words, env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)})
        else:
            order = {"command": list(command), "cwd": "/", "environment": {}}
            agents.start(order, [{"HOROVOD_RANK": str(rank), "HOROVOD_HOSTNAME": next(iter(agents._agent_of))}])

    def exits_with(self, code: int) -> None:
        if self.runner is not None:
            assert self.runner.wait(10) == code


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hosts", [["localhost"], ["far.invalid"], ["localhost", "far.invalid"]])
def test_a_rank_gets_the_values_and_nobody_else_does(
    pool: HostConnections, ssh_log: Path, hosts: list[str], way: str
) -> None:
    agents = ready(pool, *hosts)
    assert [folder.stat().st_mode & 0o777 for folder in folders(pool)] == [0o700] * len(hosts)
    script = "import json, os; print(json.dumps(os.environ['TOKEN']))"
    rank = Started(pool, agents, way, 0, [sys.executable, "-c", script])
    wait_until(lambda: agents.num_ended)
    rank.exits_with(0)
    assert not [file for folder in folders(pool) for file in folder.iterdir() if has(file, b"line one")]
    assert agents.close() == []
    assert [(rank, stream, json.loads(text)) for rank, stream, text in agents.printed()] == [
        (0, "out", VALUES["TOKEN"])
    ]
    assert connections_opened(ssh_log) == ("far.invalid" in hosts)
    if ssh_log.exists():
        assert "line one" not in ssh_log.read_text()
        assert "StrictHostKeyChecking=accept-new" in ssh_log.read_text()


def has(file: Path, part: bytes) -> bool:
    return file.is_file() and part in file.read_bytes()


@pytest.mark.parametrize("way", WAYS)
def test_failures_come_back_in_the_order_of_time(pool: HostConnections, way: str) -> None:
    agents = ready(pool, "far.invalid", "other.invalid")
    for rank, end, code in ((2, "exit 5", 5), (0, "exit 0", 0), (1, "kill -9 $$", 137), (3, "exec /no/such", 127)):
        ended = agents.num_ended
        started = Started(pool, agents, way, rank, ["sh", "-c", end])
        wait_until(lambda before=ended: agents.num_ended > before)  # type: ignore[misc]
        started.exits_with(code)
    Started(pool, agents, way, 4, ["/no/such/command"]).exits_with(127)
    wait_until(lambda: agents.num_ended == 5)
    found = agents.close()
    assert [failure[1:] for failure in found] == [
        (rank, code, os.uname().nodename) for rank, code in ((2, 5), (1, 137), (3, 127), (4, 127))
    ]
    assert (4, "err", "hvd-transformer: /no/such/command: cannot be started: No such file or directory\n") in (
        agents.printed()
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_reaches_ranks_that_run_and_ranks_that_start_later(pool: HostConnections, way: str) -> None:
    """Over MPI a rank's runner waits for the other ranks: at the first exit code mpirun would kill them."""
    agents = ready(pool, "far.invalid")
    first = Started(pool, agents, way, 0, SLEEP)
    wait_until(lambda: agents.running)
    assert agents.stop() == 1
    wait_until(lambda: not agents.running)
    second = Started(pool, agents, way, 1, SLEEP)
    wait_until(lambda: len(agents.failures) == 2)
    assert all(rank.runner is None or rank.runner.poll() is None for rank in (first, second))
    assert [failure.code for failure in agents.close()] == [128 + signal.SIGTERM] * 2
    for rank in (first, second):
        rank.exits_with(128 + signal.SIGTERM)


@pytest.mark.parametrize("way", WAYS)
def test_closing_ends_what_ignores_signals_with_all_its_children(pool: HostConnections, way: str) -> None:
    agents = ready(pool, "far.invalid")
    rank = Started(pool, agents, way, 0, ["sh", "-c", "trap '' TERM; sleep 101 & echo $$; sleep 102"])
    group = int(printed(agents))
    assert agents.close() == []  # caused by the agent, not a failure of the rank
    rank.exits_with(137)
    wait_until(lambda: not group_lives(group))


def printed(agents: HostAgents) -> str:
    found: list[tuple[int, str, str]] = []
    wait_until(lambda: found.extend(agents.printed()) or found)
    return "".join(text for _, _, text in found)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_runner_ends_its_rank(pool: HostConnections) -> None:
    agents = ready(pool, "far.invalid")
    rank = Started(pool, agents, "mpi", 0, SLEEP)
    wait_until(lambda: agents.running)
    assert rank.runner
    rank.runner.kill()
    wait_until(lambda: agents.failures)
    assert [failure.code for failure in agents.close()] == [137]
    assert rank.runner.wait(10) == -signal.SIGKILL


LAUNCHER = """
import os, sys, time
from hvd_transformer.launch.agents import HostAgents
from hvd_transformer.launch.connections import HostConnections
from hvd_transformer.launch.ssh import Ssh
pool = HostConnections(Ssh(), dict(os.environ))
agents = HostAgents(["localhost", "far.invalid"], pool)
agents.begin({})
agents.wait_ready()
order = {"command": ["sh", "-c", "trap 'touch saved-$HOROVOD_RANK; exit' TERM; while :; do sleep 0.02; done"]}
ranks = [{"HOROVOD_RANK": str(rank), "HOROVOD_HOSTNAME": host} for rank, host in enumerate(agents._agent_of)]
agents.start({**order, "cwd": os.getcwd(), "environment": {}}, ranks)
while agents.running < 2:
    time.sleep(0.01)
print(pool.folder, flush=True)
sys.stdin.read()
"""


def test_a_killed_launcher_leaves_nothing_and_its_ranks_save(ssh_log: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], cwd=tmp_path, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert launcher.stdout
    base = Path(launcher.stdout.readline().strip())
    assert len(list(base.parent.glob(f"{base.name}-*"))) == 2
    time.sleep(0.2)  # for the shells to set their traps
    launcher.kill()
    wait_until(lambda: not list(base.parent.glob(f"{base.name}-*")))
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    launcher.communicate()


def test_a_killed_agent_takes_its_ranks_with_it(pool: HostConnections) -> None:
    """Nobody else on that host could end them."""
    agents = ready(pool, "far.invalid")
    Started(pool, agents, "gloo", 0, ["sh", "-c", "echo $$; exec sleep 100"])
    rank = int(printed(agents))
    for pid in agents_of(pool.folder):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: list(agents.lost) == ["far.invalid"])
    wait_until(lambda: not group_lives(rank))
    agents.close()
    ready(pool, "far.invalid").close()  # removes the folder that the killed agent left


def test_a_host_that_cannot_be_reached_is_named_with_what_ssh_says(pool: HostConnections) -> None:
    with pytest.raises(UserError, match=r"^host refused.invalid: cannot be used: Permission denied \(publickey\)\.$"):
        ready(pool, "localhost", "far.invalid", "refused.invalid")


def test_one_ssh_per_host_serves_all_starts_of_a_job(pool: HostConnections, ssh_log: Path) -> None:
    hosts = ["localhost", "far.invalid", "other.invalid"]
    opened = pool.run(pool.open(hosts, 30.0))
    for connection in opened.values():
        assert not isinstance(connection, NoConnection)
        assert pool.run(connection.ask("exists", path="/tmp")) is True  # as the preflight asks
    for code in (3, 4):
        agents = ready(pool, *hosts)
        assert (agents.num_ended, agents.beats, agents.failures) == (0, {}, [])
        Started(pool, agents, "gloo", 0, ["sh", "-c", f"exit {code}"])
        wait_until(lambda agents=agents: agents.num_ended)  # type: ignore[misc]
        assert [failure.code for failure in agents.close()] == [code]
    assert connections_opened(ssh_log) == 2
    assert len(folders(pool)) == 3


def test_a_connection_that_sshd_drops_is_tried_again(
    pool: HostConnections, ssh_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_connection, "_PAUSES", (0.01, 0.01))
    ready(pool, "busy.invalid").close()
    assert connections_opened(ssh_log) == 3
    monkeypatch.setattr(host_connection, "_PAUSES", (0.01,))
    ssh_log.unlink()
    with pytest.raises(UserError, match=r"host busy2.invalid: cannot be used: kex_exchange_identification"):
        ready(pool, "busy2.invalid")
    assert connections_opened(ssh_log) == 2


def test_only_so_many_connections_start_at_a_time(
    ssh_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "_AT_A_TIME", 3)
    with closing(HostConnections(Ssh(), dict(os.environ))) as pool:
        hosts = [f"waits{number}.invalid" for number in range(7)]

        def count() -> int:
            return connections_opened(ssh_log)

        result: list[int] = []
        thread = threading.Thread(target=lambda: result.append(len(pool.run(pool.open(hosts, 30.0)))))
        thread.start()
        wait_until(lambda: count() == 3)
        time.sleep(0.3)
        assert count() == 3
        (tmp_path / "go").touch()
        thread.join(10)
        assert (result, count()) == ([7], 7)


def test_much_output_arrives_whole_and_errors_block_nobody(pool: HostConnections) -> None:
    """More than any pipe or buffer holds: of a rank to its agent, of ssh to the launcher."""
    agents = ready(pool, "noisy.invalid")
    script = "import sys\nfor i in range(20000): print(i, 'x' * 100)\nsys.stderr.write('é' * 100000 + ' end')"
    Started(pool, agents, "gloo", 0, [sys.executable, "-c", script])
    wait_until(lambda: agents.num_ended)
    agents.close()
    found = agents.printed()
    out, err = ("".join(text for _, name, text in found if name == stream) for stream in ("out", "err"))
    assert [int(line.split()[0]) for line in out.splitlines()] == list(range(20000))
    assert err.endswith(" end")
    assert all(text.endswith("\n") for _, name, text in found if name == "out")


def test_an_order_that_comes_with_the_end_of_a_rank(pool: HostConnections, tmp_path: Path) -> None:
    """The agent, which sleeps meanwhile, finds the order first, then output of a rank that it knows to have ended."""
    agents = ready(pool, "far.invalid")
    wait = f"echo $$; until [ -e {tmp_path}/end ]; do sleep 0.01; done; echo the end; exit 3"
    Started(pool, agents, "gloo", 0, ["sh", "-c", wait])
    rank = Path(f"/proc/{int(printed(agents))}/stat")
    [agent] = agents_of(pool.folder)
    os.kill(agent, signal.SIGSTOP)
    stopping = threading.Thread(target=agents.stop)
    stopping.start()
    time.sleep(0.1)  # for the order to arrive
    (tmp_path / "end").touch()
    wait_until(lambda: rank.read_text().split()[2] == "Z")
    os.kill(agent, signal.SIGCONT)
    wait_until(lambda: agents.num_ended or agents.lost)
    stopping.join(10)
    assert [failure.code for failure in agents.close()] == [3]
    assert agents.lost == {}
    assert [text for _, _, text in agents.printed()] == ["the end\n"]


def test_what_a_killed_agent_left_is_removed_by_the_next_one(ssh_log: Path) -> None:
    """As after a crash of the host: nothing else would ever remove it."""
    with (
        closing(HostConnections(Ssh(), dict(os.environ))) as left,
        closing(HostConnections(Ssh(), dict(os.environ))) as used,
    ):
        gone = ready(left, "far.invalid")
        ready(used, "far.invalid", "other.invalid")
        for pid in agents_of(left.folder):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: gone.lost)
        assert len(folders(left)) == 1
        with closing(HostConnections(Ssh(), dict(os.environ))) as new:
            ready(new, "far.invalid").close()
            assert (len(folders(left)), len(folders(used)), len(folders(new))) == (0, 2, 1)
    assert not any(map(folders, (left, used, new)))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_what_another_user_put_beside_it_is_left_alone(pool: HostConnections) -> None:
    """Opening a named pipe would block forever."""
    trap = Path(f"/tmp/hvd-transformer-trap-{os.getpid()}")
    trap.mkdir(mode=0o755)
    try:
        os.mkfifo(trap / "agent")
        os.chown(trap, 54321, 54321)
        ready(pool, "far.invalid").close()
        assert (trap / "agent").exists()
    finally:
        shutil.rmtree(trap)


def agents_of(folder: str) -> list[int]:
    """The node agents of a job."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().decode().split("\0")
            if words[1:4] == ["-m", "hvd_transformer.launch.node_agent", folder]:
                found.append(int(file.parent.name))
    return found

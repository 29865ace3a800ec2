"""Node agents and their ranks: who sees what, how ranks end, and that nothing outlives the launcher or its agent."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from node_agents import VALUES, Started, agents_of, connections_opened, folders, ready
from waiting import wait_until

from hvd_transformer.errors import UserError
from hvd_transformer.launch.agents import HostAgents
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.ssh import Ssh
from hvd_transformer.launch.time_limits import TimeLimits

SLEEP = ["sh", "-c", "sleep 100"]
WAYS = ["gloo", "mpi"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hosts", [["localhost"], ["far.invalid"], ["localhost", "far.invalid"]])
def test_a_rank_gets_the_values_and_nobody_else_does(
    connections: HostConnections, ssh_log: Path, hosts: list[str], way: str
) -> None:
    agents = ready(connections, *hosts)
    assert [folder.stat().st_mode & 0o777 for folder in folders(connections)] == [0o700] * len(hosts)
    script = "import json, os; print(json.dumps(os.environ['TOKEN']))"
    rank = Started(connections, agents, way, 0, [sys.executable, "-c", script])
    wait_until(lambda: agents.num_ended)
    rank.exits_with(0)
    assert not [file for folder in folders(connections) for file in folder.iterdir() if has(file, b"line one")]
    assert agents.close() == []
    assert [(rank, stream, json.loads(text)) for rank, stream, text in agents.printed()] == [
        (0, "out", VALUES["TOKEN"])
    ]
    assert connections_opened(ssh_log) == ("far.invalid" in hosts)
    if ssh_log.exists():
        assert "line one" not in ssh_log.read_text()
        assert "StrictHostKeyChecking=accept-new" in ssh_log.read_text()


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_may_start_scripts_that_import_what_is_beside_them(
    ssh_log: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as `launch` sets it for its own programs
    with closing(HostConnections(Ssh(), dict(os.environ))) as connections:
        agents = ready(connections, "localhost")
        Started(connections, agents, way, 0, ["sh", "-c", "echo ${PYTHONSAFEPATH-unset}"])
        assert printed(agents) == "unset\n"
        agents.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("host", ["localhost", "far.invalid"])
def test_ranks_see_the_gpus_of_their_host(
    connections: HostConnections, host: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the launcher itself may see."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    agents = HostAgents([host], connections)
    agents.begin(VALUES, {host: (5, 4)})
    agents.wait_ready()
    Started(connections, agents, way, 0, ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER"])
    assert printed(agents) == "5,4 PCI_BUS_ID\n"
    agents.close()


def test_two_names_of_this_machine_cannot_have_different_gpus(
    connections: HostConnections,
) -> None:
    agents = HostAgents(["localhost", "127.0.0.1"], connections)
    with pytest.raises(
        UserError, match=r"^host 127.0.0.1: is the same machine as localhost, with other gpus=; list it"
    ):
        agents.begin(VALUES, {"localhost": (0,), "127.0.0.1": (1,)})
    began = time.monotonic()
    agents.close()
    assert time.monotonic() - began < 1  # no rank has begun


def has(file: Path, part: bytes) -> bool:
    return file.is_file() and part in file.read_bytes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_what_ranks_make_has_the_rights_that_the_launchers_umask_leaves(
    connections: HostConnections, way: str, umask: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        agents = ready(connections, "far.invalid")
    finally:
        assert os.umask(before) == umask
    Started(connections, agents, way, 0, ["touch", str(tmp_path / "made")])
    wait_until(lambda: agents.num_ended)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("way", WAYS)
def test_failures_come_back_in_the_order_of_time(connections: HostConnections, way: str) -> None:
    agents = ready(connections, "far.invalid", "other.invalid")
    for rank, end, code in ((2, "exit 5", 5), (0, "exit 0", 0), (1, "kill -9 $$", 137), (3, "exec /no/such", 127)):
        ended = agents.num_ended
        started = Started(connections, agents, way, rank, ["sh", "-c", end])
        wait_until(lambda before=ended: agents.num_ended > before)  # type: ignore[misc]
        started.exits_with(code)
    Started(connections, agents, way, 4, ["/no/such/command"]).exits_with(127)
    wait_until(lambda: agents.num_ended == 5)
    found = agents.close()
    assert [failure[1:4] for failure in found] == [
        (rank, code, os.uname().nodename) for rank, code in ((2, 5), (1, 137), (3, 127), (4, 127))
    ]
    assert (4, "err", "hvd-transformer: /no/such/command: cannot be started: No such file or directory\n") in (
        agents.printed()
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_reaches_ranks_that_run_and_ranks_that_start_later(connections: HostConnections, way: str) -> None:
    """Over MPI a rank's runner waits for the other ranks: at the first exit code mpirun would kill them."""
    agents = ready(connections, "far.invalid")
    first = Started(connections, agents, way, 0, SLEEP)
    wait_until(lambda: agents.running)
    assert agents.stop() == 1
    wait_until(lambda: not agents.running)
    second = Started(connections, agents, way, 1, SLEEP)
    wait_until(lambda: len(agents.failures) == 2)
    assert all(rank.runner is None or rank.runner.poll() is None for rank in (first, second))
    assert [failure.code for failure in agents.close()] == [128 + signal.SIGTERM] * 2
    for rank in (first, second):
        rank.exits_with(128 + signal.SIGTERM)


@pytest.mark.parametrize("way", WAYS)
def test_closing_ends_what_ignores_signals_with_all_its_children(connections: HostConnections, way: str) -> None:
    agents = ready(connections, "far.invalid")
    rank = Started(connections, agents, way, 0, ["sh", "-c", "trap '' TERM; sleep 101 & echo $$; sleep 102"])
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


def test_a_killed_runner_ends_its_rank(connections: HostConnections) -> None:
    agents = ready(connections, "far.invalid")
    rank = Started(connections, agents, "mpi", 0, SLEEP)
    wait_until(lambda: agents.running)
    assert rank.runner
    rank.runner.kill()
    wait_until(lambda: agents.failures)
    assert [failure.code for failure in agents.close()] == [137]
    assert rank.runner.wait(10) == -signal.SIGKILL


LAUNCHER = """
import os, sys, time
from hvd_transformer.launch.agents import HostAgents
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.ssh import Ssh
connections = HostConnections(Ssh(), dict(os.environ))
agents = HostAgents(["localhost", "far.invalid"], connections)
agents.begin({})
agents.wait_ready()
script = "trap 'touch saved-$HOROVOD_RANK; exit' TERM; touch ready-$HOROVOD_RANK; while :; do sleep 0.02; done"
order = {"command": ["sh", "-c", script]}
ranks = [{"HOROVOD_RANK": str(rank), "HOROVOD_HOSTNAME": host} for rank, host in enumerate(agents._agent_of)]
agents.start({**order, "cwd": os.getcwd(), "environment": {}}, ranks)
while agents.running < 2:
    time.sleep(0.01)
print(connections.folder, flush=True)
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
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    launcher.kill()
    wait_until(lambda: not list(base.parent.glob(f"{base.name}-*")))
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    launcher.communicate()


SUSPENDED = """
import json, os, sys, time
from hvd_transformer.launch import time_limits
from hvd_transformer.launch.agents import HostAgents
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.ssh import Ssh
time_limits._RANK_SILENCE = 1.0
connections = HostConnections(Ssh(), dict(os.environ), time_limits.TimeLimits(silence=2.0))
agents = HostAgents(["localhost", "far.invalid"], connections)
silence, connections.limits = connections.limits, time_limits.TimeLimits()  # a start may take longer
agents.begin({})
agents.wait_ready()
connections.limits = silence
ranks = [{"HOROVOD_RANK": str(rank), "HOROVOD_HOSTNAME": host} for rank, host in enumerate(agents._agent_of)]
agents.start({"command": [sys.executable, "-c", sys.argv[1]], "cwd": os.getcwd(), "environment": {}}, ranks)
while len(agents.beats) < 2:
    time.sleep(0.01)
print(connections.folder, flush=True)
sys.stdin.readline()
print(json.dumps([agents.running, agents.lost, agents.silent]), flush=True)
agents.close()
connections.close()
"""
BEATING = """
import json, os, time
rank, folder = int(os.environ["HOROVOD_RANK"]), os.environ["HVD_TRANSFORMER_FOLDER"]
open(f"pid-{rank}", "w").write(str(os.getpid()))
while True:
    with open(f"{folder}/new-{rank}", "w") as file:
        json.dump({"rank": rank, "time": time.monotonic(), "phase": "step"}, file)
    os.rename(file.name, f"{folder}/beat-{rank}")
    time.sleep(0.5)
"""


def test_a_job_that_is_suspended_as_a_whole_continues(ssh_log: Path, tmp_path: Path) -> None:
    """For longer than any of its processes would wait for another one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", SUSPENDED, BEATING], cwd=tmp_path, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert launcher.stdout
    folder = launcher.stdout.readline().strip()
    ranks = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    every = [launcher.pid, *agents_of(folder), *ranks]
    assert len(every) == 5
    for number, seconds in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 3.0)):
        for pid in every:
            os.kill(pid, number)
        time.sleep(seconds)
    told, _ = launcher.communicate("\n")
    assert json.loads(told) == [2, {}, False]
    assert launcher.returncode == 0


def test_a_killed_agent_takes_its_ranks_with_it(connections: HostConnections) -> None:
    """Nobody else on that host could end them."""
    agents = ready(connections, "far.invalid")
    Started(connections, agents, "gloo", 0, ["sh", "-c", "echo $$; exec sleep 100"])
    rank = int(printed(agents))
    [its_folder] = folders(connections)
    for pid in agents_of(connections.folder):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: list(agents.lost) == ["far.invalid"])
    wait_until(lambda: not group_lives(rank))
    agents.close()
    ready(connections, "far.invalid").close()
    # By the new agent or by another job's on this host, as those of tests that run beside this one.
    wait_until(lambda: not its_folder.exists())
    assert not group_lives(rank)


def test_a_host_is_lost_after_the_time_that_was_asked_for(ssh_log: Path) -> None:
    with closing(HostConnections(Ssh(), dict(os.environ))) as connections:
        agents = ready(connections, "far.invalid")
        connections.limits = TimeLimits(silence=1.5)
        (pid,) = agents_of(connections.folder)
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            wait_until(lambda: agents.lost)
            assert 0.5 < time.monotonic() - began < 5
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_rank_without_a_heartbeat_hangs_whatever_it_may_take(connections: HostConnections) -> None:
    """Within 30 seconds, while an evaluation may take minutes."""
    agents = ready(connections, "far.invalid")
    for phase, age, silent in (
        ("evaluation", 19, False),
        ("evaluation", 21, True),
        ("forward", 21, True),
        ("start", 59, False),
        ("start", 61, True),
    ):
        assert agents.is_silent({"phase": phase, "age": age, "limit_seconds": 450.0}) == silent
    agents.close()


def test_a_rank_that_has_ended_is_not_silent(connections: HostConnections) -> None:
    """While others save: its heartbeat stays as it was."""
    agents = ready(connections, "far.invalid")
    beat = f'{{"rank": 0, "time": {time.monotonic()}, "phase": "step"}}'
    Started(connections, agents, "gloo", 0, ["sh", "-c", f"echo '{beat}' >$HVD_TRANSFORMER_FOLDER/beat-0; exit 1"])
    Started(connections, agents, "gloo", 1, SLEEP)
    wait_until(lambda: agents.num_ended == 1 and agents.beats)
    time.sleep(2.5)
    assert agents.beats[0]["age"] < 2
    agents.close()


def test_much_output_arrives_whole_and_errors_block_nobody(connections: HostConnections) -> None:
    """More than any pipe or buffer holds: of a rank to its agent, of ssh to the launcher."""
    agents = ready(connections, "noisy.invalid")
    script = "import sys\nfor i in range(20000): print(i, 'x' * 100)\nsys.stderr.write('é' * 100000 + ' end')"
    Started(connections, agents, "gloo", 0, [sys.executable, "-c", script])
    wait_until(lambda: agents.num_ended)
    agents.close()
    found = agents.printed()
    out, err = ("".join(text for _, name, text in found if name == stream) for stream in ("out", "err"))
    assert [int(line.split()[0]) for line in out.splitlines()] == list(range(20000))
    assert err.endswith(" end")
    assert all(text.endswith("\n") for _, name, text in found if name == "out")


def test_an_order_that_comes_with_the_end_of_a_rank(connections: HostConnections, tmp_path: Path) -> None:
    """The agent, which sleeps meanwhile, finds the order first, then output of a rank that it knows to have ended."""
    agents = ready(connections, "far.invalid")
    wait = f"echo $$; until [ -e {tmp_path}/end ]; do sleep 0.01; done; echo the end; exit 3"
    Started(connections, agents, "gloo", 0, ["sh", "-c", wait])
    rank = Path(f"/proc/{int(printed(agents))}/stat")
    [agent] = agents_of(connections.folder)
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

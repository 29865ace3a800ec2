"""One ssh per host: reused, tried again, few at a time; and the folders that agents make there and leave."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from node_agents import Started, agents_of, connections_opened, folders, ready
from waiting import is_running, wait_until

from hvd_transformer.errors import UserError
from hvd_transformer.launch.connection import connections as connections_module
from hvd_transformer.launch.connection import host_connection
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.host_connection import HostConnection, NoConnection
from hvd_transformer.launch.connection.ssh import Ssh
from hvd_transformer.launch.horovodrun_command import Horovodrun, launcher_environment, secret_values
from hvd_transformer.launch.host_pool import HostPool
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.node.agent_folder import sockets
from hvd_transformer.launch.output.launch_output import LaunchOutput
from hvd_transformer.launch.output.launch_screen import Screen
from hvd_transformer.launch.restart_policy import Limits
from hvd_transformer.launch.supervisor import LaunchPlan, Supervisor


def test_a_host_that_cannot_be_reached_is_named_with_what_ssh_says(connections: HostConnections) -> None:
    with pytest.raises(UserError, match=r"^host refused.invalid: cannot be used: Permission denied \(publickey\)\.$"):
        ready(connections, "localhost", "far.invalid", "refused.invalid")


def test_one_ssh_per_host_serves_all_starts_of_a_job(connections: HostConnections, ssh_log: Path) -> None:
    hosts = ["localhost", "far.invalid", "other.invalid"]
    opened = connections.run(connections.open(hosts, 30.0))
    for connection in opened.values():
        assert not isinstance(connection, NoConnection)
        assert connections.run(connection.ask("exists", path="/tmp")) is True  # as the preflight asks
    for code in (3, 4):
        agents = ready(connections, *hosts)
        assert (agents.num_ended, agents.beats, agents.failures) == (0, {}, [])
        Started(connections, agents, "gloo", 0, ["sh", "-c", f"exit {code}"])
        wait_until(lambda agents=agents: agents.num_ended)  # type: ignore[misc]
        assert [failure.code for failure in agents.close()] == [code]
    assert connections_opened(ssh_log) == 2
    assert len(folders(connections)) == 3


def test_a_host_whose_idle_connection_has_ended_is_connected_anew_at_once(
    connections: HostConnections, ssh_log: Path
) -> None:
    """As when the network broke for a while: the host is back, and its old ssh has ended."""
    for count in (1, 2):
        (connection,) = connections.run(connections.open(["far.invalid"], 30.0)).values()
        assert isinstance(connection, HostConnection)
        assert connections_opened(ssh_log) == count
        assert connections.run(connection.ask("exists", path="/tmp")) is True
        os.killpg(connection._process.pid, signal.SIGKILL)
        wait_until(lambda connection=connection: connection.has_ended)  # type: ignore[misc]


def test_what_ssh_has_started_keeps_nobody_waiting(connections: HostConnections, ssh_log: Path) -> None:
    """A jump's ssh has its output, and so has the process of ControlPersist, which is in a session of its own."""
    began = time.monotonic()
    (found,) = connections.run(connections.open(["jumps.invalid"], 1.0)).values()
    assert isinstance(found, NoConnection)
    assert time.monotonic() - began < 4
    jump = int((ssh_log.parent / "jump").read_text())
    wait_until(lambda: not is_running(jump))


def test_a_connection_that_sshd_drops_is_tried_again(
    connections: HostConnections, ssh_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_connection, "_PAUSES", (0.01, 0.01))
    ready(connections, "busy.invalid").close()
    assert connections_opened(ssh_log) == 3
    monkeypatch.setattr(host_connection, "_PAUSES", (0.01,))
    ssh_log.unlink()
    with pytest.raises(UserError, match=r"host busy2.invalid: cannot be used: kex_exchange_identification"):
        ready(connections, "busy2.invalid")
    assert connections_opened(ssh_log) == 2


def test_only_so_many_connections_start_at_a_time(
    ssh_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "_AT_A_TIME", 3)
    with closing(HostConnections(Ssh(), dict(os.environ))) as connections:
        hosts = [f"waits{number}.invalid" for number in range(7)]

        def count() -> int:
            return connections_opened(ssh_log)

        result: list[int] = []
        thread = threading.Thread(target=lambda: result.append(len(connections.run(connections.open(hosts, 30.0)))))
        thread.start()
        wait_until(lambda: count() == 3)
        time.sleep(0.3)
        assert count() == 3
        (tmp_path / "go").touch()
        thread.join(10)
        assert (result, count()) == ([7], 7)


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
        with closing(HostConnections(Ssh(), dict(os.environ))) as new:
            ready(new, "far.invalid").close()
            wait_until(lambda: not folders(left))  # an agent of another test may be removing it
            assert (len(folders(used)), len(folders(new))) == (2, 1)
    assert not any(map(folders, (left, used, new)))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_what_another_user_put_beside_it_is_left_alone(connections: HostConnections) -> None:
    """Opening a named pipe would block forever."""
    trap = Path(f"/tmp/hvd-transformer-{os.getpid()}-00000000-00000000-trap")
    trap.mkdir(mode=0o755)
    try:
        os.mkfifo(trap / "agent")
        os.chown(trap, 54321, 54321)
        ready(connections, "far.invalid").close()
        assert (trap / "agent").exists()
    finally:
        shutil.rmtree(trap)


def test_no_folder_but_an_agents_is_taken_for_a_leftover(connections: HostConnections) -> None:
    """Such as a checkout of ours."""
    checkout = Path(f"/tmp/hvd-transformer-checkout-{os.getpid()}")
    checkout.mkdir()
    try:
        (checkout / "agent").touch()
        ready(connections, "far.invalid").close()
        assert (checkout / "agent").exists()
    finally:
        shutil.rmtree(checkout)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_over_mpi_no_rank_is_sent_to_another_users_socket(connections: HostConnections) -> None:
    """Everybody can read the beginning of the folder's name in mpirun's command line."""
    ready(connections, "far.invalid")
    (agent,) = folders(connections)
    trap = agent.with_name(f"{agent.name[:-8]}!")
    trap.mkdir(mode=0o755)
    try:
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind(str(trap / "runners"))
            os.chown(trap, 54321, 54321)
            assert sockets(connections.folder) == [str(agent / "runners")]
    finally:
        shutil.rmtree(trap)
    trap.symlink_to(agent)
    try:
        os.lchown(trap, 54321, 54321)
        assert sockets(connections.folder) == [str(agent / "runners")]
    finally:
        trap.unlink()


def test_two_that_want_the_same_new_host_get_one_connection(
    connections: HostConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, pauses = HostConnection.open, iter([0.3, 0.0])

    async def late(*given: Any) -> HostConnection | NoConnection:
        await asyncio.sleep(next(pauses))
        return await real(*given)

    monkeypatch.setattr(HostConnection, "open", late)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(connections.run, connections.open(["far.invalid"], 30.0)) for _ in range(2)]
    first, second = (own.result()["far.invalid"] for own in found)
    assert isinstance(first, HostConnection) and first is second


def test_a_probe_is_asked_one_question_at_a_time(connections: HostConnections) -> None:
    (found,) = connections.run(connections.open(["far.invalid"], 30.0)).values()
    assert isinstance(found, HostConnection)

    async def ask_all() -> list[bool]:
        return await asyncio.gather(*(found.ask("exists", path=path) for path in ("/tmp", "/no/such", "/tmp")))

    assert connections.run(ask_all()) == [True, False, True]


def test_an_agent_is_asked_no_questions(connections: HostConnections) -> None:
    ready(connections, "far.invalid")
    (found,) = connections.run(connections.open(["far.invalid"], 30.0)).values()
    assert isinstance(found, HostConnection)
    with pytest.raises(UserError, match="host far.invalid: its node agent answers no questions"):
        connections.run(found.ask("exists", path="/tmp"))
    assert not found.lost


SHADOWS = [
    "asyncio",
    "contextlib",
    "json",
    "pathlib",
    "random",
    "re",
    "runpy",
    "selectors",
    "signal",
    "socket",
    "typing",
]


@pytest.mark.parametrize("host", ["localhost", "far.invalid"])
def test_no_file_of_the_home_folder_takes_the_place_of_the_standard_library(
    connections: HostConnections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """It is the current folder of what ssh starts, and Python imports from there first; 3.10 always does."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [*SHADOWS, "hvd_transformer"]:
        (home / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close(); raise SystemExit({name!r})")
    monkeypatch.chdir(home)
    assert "PYTHONSAFEPATH" not in os.environ
    ready(connections, host).close()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("host", ["localhost", "far.invalid"])
def test_pythonpath_counts_for_the_agent(ssh_log: Path, tmp_path: Path, host: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    own = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'code'}{os.pathsep}{own}"}
    with closing(HostConnections(Ssh(), environment)) as connections:
        (found,) = connections.run(connections.open([host], 30.0)).values()
        assert isinstance(found, HostConnection)
        (tmp_path / "ran").unlink(missing_ok=True)
        ready(connections, host).close()
        assert (tmp_path / "ran").exists()


def test_ssh_has_the_environment_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tickets of Kerberos, an agent of gpg; but no screen, which it would offer to the ranks."""
    said = tmp_path / "said"
    told = "$KRB5CCNAME $XDG_RUNTIME_DIR ${DISPLAY-none} ${LC_ALL-none} $LC_MESSAGES"
    (tmp_path / "ssh").write_text(f'#!/bin/sh\necho "{told}" >{said}\nexit 255\n')
    (tmp_path / "ssh").chmod(0o755)
    for name, value in {"KRB5CCNAME": "FILE:/tmp/krb", "XDG_RUNTIME_DIR": "/run/user/7", "DISPLAY": ":0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environment = launcher_environment(os.environ, [])
    assert "KRB5CCNAME" not in environment  # of horovodrun and the ranks
    with closing(HostConnections(Ssh(), environment)) as connections:
        connections.run(connections.open(["far.invalid"], 30.0))
    assert said.read_text() == "FILE:/tmp/krb /run/user/7 none none C\n"


def test_ssh_gets_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SendEnv it may pass on all that it has. What it needs itself it keeps, also if it is named by --env."""
    said = tmp_path / "said"
    (tmp_path / "ssh").write_text(f"#!/bin/sh\nenv >{said}\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    own = {
        "MY_TOKEN": "named",
        "HVD_TRANSFORMER_TOKEN": "of-the-service",
        "KRB5CCNAME": "FILE:/tmp/krb",
        "https_proxy": "http://proxy",
        "MY_OWN": "1",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    named = ["MY_TOKEN", "KRB5CCNAME"]
    environment, values = launcher_environment(os.environ, named), secret_values(os.environ, named)
    pool = HostPool(lambda: [Host("far.invalid", 1)], None)
    plan = LaunchPlan([], [], values, environment, Limits(0, 0.0), 1)
    with (
        closing(HostConnections(Ssh(), environment)) as connections,
        closing(LaunchOutput(Screen(), None)) as output,
    ):
        Supervisor(plan, Horovodrun(pool.hosts()), pool, connections, output)
        connections.run(connections.open(["far.invalid"], 30.0))
    found = dict(line.split("=", 1) for line in said.read_text().splitlines() if "=" in line)
    assert {name for name in own if name in found} == {"KRB5CCNAME", "https_proxy", "MY_OWN"}

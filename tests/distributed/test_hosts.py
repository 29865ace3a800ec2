"""The hosts that other tests run on are what they seem: apart from each other, and gone without a trace."""

import os
import subprocess
from pathlib import Path

import pytest
from hosts import Hosts

pytestmark = pytest.mark.distributed
NUM_HOSTS = 3


def ssh(hosts: Hosts, to: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["ssh", "-o", "BatchMode=yes", *options, "-o", "ConnectTimeout=20", to, command]  # the first one counts
    return hosts.run("h1", words)


def test_each_has_its_own_name_address_and_server(hosts: Hosts) -> None:
    for host in hosts.names:
        answer = ssh(hosts, host, "hostname; echo $SSH_CONNECTION; pwd")
        assert answer.returncode == 0, answer.stderr
        name, connection, home = answer.stdout.splitlines()
        assert (name, connection.split()[2], home) == (host, hosts.address(host), str(hosts.home))
    assert hosts.run("h2", ["ssh", "h3", "hostname"]).stdout == "h3\n"
    known = (hosts.home / ".ssh" / "known_hosts").read_text()
    assert len({line.split()[-1] for line in known.splitlines() if "ed25519" in line}) == 3
    assert os.uname().nodename not in hosts.names


def test_the_machine_sees_nothing_of_them(hosts: Hosts) -> None:
    assert "h2" not in Path("/etc/hosts").read_text().split()
    assert subprocess.run(["ip", "link", "show", "br0"], capture_output=True).returncode != 0
    assert str(hosts.folder) not in Path("/etc/passwd").read_text() + Path("/proc/self/mounts").read_text()


def test_commands_run_where_and_as_asked(hosts: Hosts, tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "WORD": "x"}
    answer = hosts.run("h2", ["sh", "-c", "hostname; pwd; echo $WORD; cat; exit 3"], cwd=tmp_path, env=env, input="in")
    assert (answer.returncode, answer.stdout) == (3, f"h2\n{tmp_path}\nx\nin")
    with hosts.popen("h2", ["sleep", "100"]) as process:
        while "sleep 100" not in hosts.processes("h2").values():
            pass
        assert hosts.processes("h2")[process.pid] == "sleep 100"
        assert process.pid not in hosts.processes("h3")
        process.kill()


def test_a_cut_link_is_silent_until_the_host_joins_again(hosts: Hosts) -> None:
    hosts.cut("h3")
    answer = ssh(hosts, "h3", "true", "-o", "ConnectTimeout=1")
    assert answer.returncode == 255
    assert "timed out" in answer.stderr or "No route" in answer.stderr
    assert ssh(hosts, "h2", "true").returncode == 0
    hosts.join("h3")
    assert ssh(hosts, "h3", "true").returncode == 0


def test_a_killed_host_has_no_process_and_refuses(hosts: Hosts) -> None:
    with hosts.popen("h1", ["ssh", "h2", "sleep 100"], stderr=subprocess.PIPE) as client:
        while "sleep 100" not in " ".join(hosts.processes("h2").values()):
            assert client.poll() is None
        hosts.kill_host("h2")
        assert hosts.processes("h2") == {}
        assert client.wait(10) == 255  # told at once, as the network is there
    assert "refused" in ssh(hosts, "h2", "true").stderr
    hosts.start_host("h2")
    assert ssh(hosts, "h2", "true").returncode == 0


def test_another_port_and_another_host_key(hosts: Hosts) -> None:
    assert ssh(hosts, "h2", "true").returncode == 0
    hosts.kill_host("h2")
    hosts.start_host("h2", "-p", "2222")
    assert "refused" in ssh(hosts, "h2", "true").stderr
    hosts.kill_host("h2")
    hosts.new_host_key("h2")
    hosts.start_host("h2")
    assert "IDENTIFICATION HAS CHANGED" in ssh(hosts, "h2", "true").stderr
    (hosts.home / ".ssh" / "known_hosts").unlink()
    assert ssh(hosts, "h2", "true").returncode == 0


def test_closing_leaves_no_process_and_no_file(hosts: Hosts) -> None:
    """Beside another set of hosts with the same names and addresses, and although a command still runs."""
    with pytest.raises(ZeroDivisionError), Hosts(1, private_tmp=True) as others:
        (Path("/tmp") / f"seen-{others.folder.name}").touch()
        listing = others.run("h1", ["ls", "/tmp"], cwd="/").stdout.split()
        (Path("/tmp") / f"seen-{others.folder.name}").unlink()
        assert f"seen-{others.folder.name}" not in listing
        with others.popen("h1", ["sleep", "100"], cwd="/"):
            namespace = network(next(iter(others.processes("h1"))))
            others.close()
        raise ZeroDivisionError
    assert not others.folder.exists()
    assert namespace not in [network(int(process.name)) for process in Path("/proc").glob("[0-9]*")]
    assert ssh(hosts, "h2", "true").returncode == 0


def network(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink()
    except OSError:  # ended meanwhile
        return None

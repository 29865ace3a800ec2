"""What the launcher does when ranks or hosts fail or join: with real processes, under a stand-in for ssh."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from waiting import wait_until

from hvd_transformer.errors import UserError
from hvd_transformer.launch import host_discovery, host_pool, restart_policy
from hvd_transformer.launch import supervisor as supervisor_module
from hvd_transformer.launch.agents import HostAgents
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.ssh import Ssh
from hvd_transformer.launch.doctor.findings import Finding
from hvd_transformer.launch.horovodrun_command import Horovodrun
from hvd_transformer.launch.host_discovery import Examine
from hvd_transformer.launch.host_pool import FindHosts, HostPool, from_script
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.launched_job import LaunchedJob
from hvd_transformer.launch.output.launch_output import LaunchOutput
from hvd_transformer.launch.output.launch_screen import Screen
from hvd_transformer.launch.restart_policy import Limits
from hvd_transformer.launch.supervisor import LaunchPlan, Supervisor
from hvd_transformer.launch.time_limits import TimeLimits

SSH = """#!/bin/sh
for last; do :; done
for word; do case "$word" in *.invalid) host=$word;; esac; done
[ ! -e "$STAND/down-$host" ] || { echo "ssh: connect to host $host: No route to host" >&2; exit 255; }
echo $$ >"$STAND/ssh-$host"
exec sh -c "exec $last"
"""
# Each rank records the number of ranks at each start; what it does then is up to the test.
WORKER = 'cd "$STAND"; echo $HOROVOD_SIZE >>starts-$HOROVOD_RANK; start=$(wc -l <starts-$HOROVOD_RANK); '


def beat(step: object, limit: int = 60, waits_for: str = "null") -> str:
    """Writes a heartbeat, which the launcher gets within the pause."""
    values = '"phase": "step", "step": %d, "limit_seconds": %d, "waits_for": %s'
    return f"""
printf '{{"rank": %d, "host": "%s", "time": %d, {values}}}' $HOROVOD_RANK $(uname -n) $(cut -d. -f1 /proc/uptime) \\
    {step} {limit} '{waits_for}' >"$HVD_TRANSFORMER_FOLDER/beat-$HOROVOD_RANK"; sleep 1.5
"""


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what ranks write, and ssh as above. All hosts have this machine's addresses."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "ssh").write_text(SSH)
    (commands / "ssh").chmod(0o755)
    monkeypatch.setattr(HostAgents, "interfaces", lambda agents, wanted: None)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND", str(tmp_path))
    monkeypatch.setattr(restart_policy, "_BACK_OFF_SECONDS", (0.0,))
    return tmp_path


def supervise(
    stand: Path,
    script: str,
    find: FindHosts,
    restarts: int = 0,
    min_ranks: int = 1,
    num_ranks: int | None = None,
    give_up_seconds: float = 600.0,
    examine: Examine | None = None,
    limits: TimeLimits | None = None,
    watch: Callable[[Supervisor], object] = lambda supervisor: None,
    job_name: str = "",
) -> int:
    hosts = HostPool(find, num_ranks)
    words = ["sh", "-c", WORKER + script]
    plan = LaunchPlan(words, words, {}, dict(os.environ), Limits(restarts, give_up_seconds), min_ranks, job_name)
    with (
        LaunchedJob(stand / "run") as job,
        closing(LaunchOutput(Screen(), job)) as output,
        closing(HostConnections(Ssh(), plan.environment, limits)) as connections,
    ):
        supervisor = Supervisor(plan, Horovodrun(hosts.hosts()), hosts, connections, output, examine)
        watch(supervisor)
        return supervisor.run()


def given(**slots: int) -> FindHosts:
    """Fixed hosts; all except localhost are reached by ssh."""
    return lambda: [Host(name if name == "localhost" else f"{name}.invalid", count) for name, count in slots.items()]


def starts(stand: Path) -> list[int]:
    return [int(line) for line in (stand / "starts-0").read_text().split()]


def refusing(*names: str) -> Examine:
    """Hosts that cannot run the job, as the preflight says it."""
    return lambda hosts: {
        host.name: Finding(host.name, "data.source=x is not there", "copy it there")
        for host in hosts
        if host.name in names
    }


def test_goes_on_after_a_failure_and_says_so(stand: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "[ $start = 2 ] && exit 0; [ $HOROVOD_RANK = 0 ] && exec sleep 100"
    script += "; until [ -e starts-0 ]; do sleep 0.01; done; echo the cause >&2; kill -9 $$"
    (stand / "run" / "logs").mkdir(parents=True)
    assert supervise(stand, script, given(localhost=2), restarts=1, min_ranks=2) == 0
    assert starts(stand) == [2, 2]
    said = capfd.readouterr().err.splitlines()
    assert said == [
        f"hvd-transformer: rank 1 on host {os.uname().nodename} failed first, with exit code 137 (SIGKILL)",
        "hvd-transformer: the last lines of rank 1:",
        "  the cause",
        "hvd-transformer: restart 1 of 1: 2 ranks on localhost",
    ]
    log = (stand / "run" / "logs" / "launch.log").read_text().splitlines()
    assert {"rank 1: the cause", "restart 1 of 1: 2 ranks on localhost"} <= set(log)


@pytest.mark.parametrize(("restarts", "code", "count"), [(0, 7, 1), (1, 7, 2), (5, 2, 1)])
def test_gives_up_after_the_restarts_and_at_once_for_wrong_input(
    stand: Path, restarts: int, code: int, count: int
) -> None:
    assert supervise(stand, f"exit {code}", given(localhost=1), restarts) == code
    assert starts(stand) == [1] * count


def test_a_step_that_fails_three_times_is_not_tried_again(stand: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = beat("$((start == 1 ? 4 : 31))") + "exit 1"
    assert supervise(stand, script, given(localhost=1), restarts=9) == 1
    assert starts(stand) == [1] * 4
    assert "hvd-transformer: giving up: failed 3 times after step 31" in capfd.readouterr().err


def test_a_lost_host_is_left_alone_and_the_others_go_on(stand: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def lose() -> None:
        wait_until(lambda: len(list(stand.glob("starts-*"))) == 4)
        (stand / "down-far.invalid").touch()
        os.kill(int((stand / "ssh-far.invalid").read_text()), signal.SIGKILL)

    threading.Thread(target=lose, daemon=True).start()
    assert supervise(stand, "[ $start = 2 ] || sleep 100", given(localhost=2, far=2), restarts=1, min_ranks=2) == 0
    assert starts(stand) == [4, 2]
    said = capfd.readouterr().err
    assert "hvd-transformer: host far.invalid is lost" in said
    assert "failed first" not in said


def test_waits_for_a_host_that_is_needed(
    stand: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_pool, "COOL_DOWN_SECONDS", 0.5)

    def lose_and_return() -> None:
        wait_until(lambda: len(list(stand.glob("starts-*"))) == 4)
        (stand / "down-far.invalid").touch()
        os.kill(int((stand / "ssh-far.invalid").read_text()), signal.SIGKILL)
        wait_until(lambda: "is not there" in "".join(said.append(capfd.readouterr().err) or said))
        (stand / "down-far.invalid").unlink()

    said: list[str] = []
    threading.Thread(target=lose_and_return, daemon=True).start()

    def examine(hosts: Sequence[Host]) -> Mapping[str, Finding]:
        return refusing("far.invalid")(hosts) if (stand / "down-far.invalid").exists() else {}

    script = "[ $start = 2 ] || sleep 100"
    assert supervise(stand, script, given(localhost=2, far=2), restarts=1, min_ranks=4, examine=examine) == 0
    assert starts(stand) == [4, 4]
    assert "waiting for hosts: 2 slots now, 4 needed" in "".join(said)


def test_a_host_that_stays_dead_does_not_keep_the_others(stand: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def lose() -> None:
        wait_until(lambda: len(list(stand.glob("starts-*"))) == 4)
        (stand / "down-far.invalid").touch()
        os.kill(int((stand / "ssh-far.invalid").read_text()), signal.SIGKILL)

    threading.Thread(target=lose, daemon=True).start()
    began = time.monotonic()
    hosts = given(localhost=2, far=2)
    assert supervise(stand, "sleep 100", hosts, restarts=3, min_ranks=4, give_up_seconds=3) != 0
    assert time.monotonic() - began < 20
    assert starts(stand) == [4]
    said = capfd.readouterr().err
    assert "giving up: no new step for 3 s after a failure (--give-up-after)" in said


def test_a_host_that_is_lost_at_each_start_uses_up_the_restarts(
    stand: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_pool, "COOL_DOWN_SECONDS", 0.1)

    def lose() -> None:
        wait_until(lambda: len(list(stand.glob("starts-*"))) == 4)
        (stand / "down-far.invalid").touch()
        os.kill(int((stand / "ssh-far.invalid").read_text()), signal.SIGKILL)

    threading.Thread(target=lose, daemon=True).start()
    assert supervise(stand, "sleep 100", given(localhost=2, far=2), restarts=3, min_ranks=4) != 0
    assert starts(stand) == [4]
    assert "giving up after 3 restarts" in capfd.readouterr().err


def test_a_host_that_cannot_run_the_job_is_left_out_of_its_start(
    stand: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise(stand, "exit 0", given(localhost=2, far=2), min_ranks=2, examine=refusing("far.invalid")) == 0
    assert starts(stand) == [2]
    said = capfd.readouterr().err
    assert said == ("hvd-transformer: host far.invalid: data.source=x is not there; copy it there; excluded for 10 s\n")


def test_without_enough_others_it_refuses_the_start(stand: Path) -> None:
    with pytest.raises(UserError, match=r"^host far.invalid: data.source=x is not there; .* \(--no-preflight starts"):
        supervise(stand, "exit 0", given(localhost=2, far=2), min_ranks=3, examine=refusing("far.invalid"))
    assert not (stand / "starts-0").exists()


OWN = Finding("launcher", "no network interface in common with the others: it has eth0", "give it the same name")


def test_a_problem_of_the_launchers_own_host_ends_the_start(stand: Path) -> None:
    """No host of the job can be excluded for it."""
    examined, told = [], list[Supervisor]()

    def examine(hosts: Sequence[Host]) -> Mapping[str, Finding]:
        examined.append(hosts)
        assert len(examined) < 3, "it looks again and again"
        return {OWN.host: OWN}

    with pytest.raises(UserError, match="^host launcher: no network interface in common with the others: it has eth0;"):
        supervise(stand, "exit 0", given(far=2), examine=examine, watch=told.append)
    assert not (stand / "starts-0").exists()
    assert told[0].how()["refused"] == {}  # no other hosts would help: a service does not queue the job again


def test_a_restart_waits_for_the_launchers_own_network(
    stand: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_FAILED_SECONDS", 0.1)
    findings: list[Mapping[str, Finding]] = [{}, {OWN.host: OWN}, {OWN.host: OWN}, {}]
    script = "[ $start = 2 ] && exit 0; exit 1"
    assert supervise(stand, script, given(far=1), restarts=1, examine=lambda hosts: findings.pop(0)) == 0
    assert starts(stand) == [1, 1]
    said = capfd.readouterr().err
    assert said.count("host launcher: no network interface in common with the others") == 1
    assert "excluded" not in said


def test_while_it_waits_it_says_what_is_new(
    stand: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First there is no host, then this host's network has a problem: told once, looked at seldom, named at the end."""
    searches, examined = list[float](), list[float]()
    told: list[Supervisor] = []

    def find() -> list[Host]:
        if told and told[0].how()["cause"]:  # it waits
            searches.append(time.monotonic())
            return [Host("far.invalid", 1)] if len(searches) > 6 else []
        return [Host("far.invalid", 1)]

    def examine(hosts: Sequence[Host]) -> Mapping[str, Finding]:
        if not searches:
            return {}
        examined.append(time.monotonic())
        return {OWN.host: OWN}

    monkeypatch.setattr(supervisor_module, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(supervisor_module, "_FAILED_SECONDS", 1.0)
    code = supervise(stand, "exit 7", find, restarts=1, give_up_seconds=3, examine=examine, watch=told.append)
    assert (code, starts(stand)) == (7, [1])
    assert 2 <= len(examined) <= 5
    said = capfd.readouterr().err
    assert said.count("waiting for hosts: 0 slots now, 1 needed") == 1
    assert said.count(str(OWN)) == 1
    late = "giving up: no new step for 3 s after a failure (--give-up-after)"
    assert told[0].how()["cause"].endswith(f"; {OWN}; {late}")
    assert told[0].how()["refused"] == {}


def test_a_signal_ends_the_search_for_the_first_hosts(stand: Path) -> None:
    examined = []

    def examine(hosts: Sequence[Host]) -> Mapping[str, Finding]:
        examined.append(hosts)
        os.kill(os.getpid(), signal.SIGTERM)
        return refusing("far.invalid")(hosts)

    assert supervise(stand, "exit 0", given(localhost=2, far=2), examine=examine) == 1
    assert len(examined) == 1
    assert not (stand / "starts-0").exists()


def test_a_host_that_leaves_for_good_is_waited_for_no_longer_than_asked_for(
    stand: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[Supervisor] = []
    hurry = threading.Timer(30, os.kill, [os.getpid(), signal.SIGTERM])
    hurry.start()
    leave = "until [ -e ready-0 ]; do sleep 0.05; done; kill -TERM $PPID"  # its node agent: the host is about to end
    script = f'trap "exit 1" TERM; touch ready-$HOROVOD_RANK; [ $HOROVOD_RANK = 1 ] && {{ {leave}; }}'
    script += "; while :; do sleep 0.05; done"
    hosts = given(localhost=1, far=1)
    assert supervise(stand, script, hosts, restarts=3, min_ranks=2, give_up_seconds=2, watch=told.append) == 1
    hurry.cancel()
    assert starts(stand) == [2]
    why = "giving up: no new step for 2 s after a failure (--give-up-after)"
    assert (told[0].how()["stopped"], told[0].how()["cause"]) == (None, f"host far.invalid is about to end; {why}")
    assert why in capfd.readouterr().err


def test_it_tells_refused_hosts_from_wrong_input(stand: Path) -> None:
    told: list[Supervisor] = []
    with pytest.raises(UserError):
        supervise(
            stand, "exit 0", given(localhost=2, far=2), min_ranks=3, examine=refusing("far.invalid"), watch=told.append
        )
    assert told[0].how() == {
        "cause": "",
        "stopped": None,
        "restarts": 0,
        "step": None,
        "hosts": [],
        "refused": {"far.invalid": "data.source=x is not there; copy it there"},
        "lost": [],
    }
    assert supervise(stand, "exit 2", given(localhost=2), watch=told.append) == 2
    assert (told[1].how()["refused"], told[1].how()["lost"]) == ({}, [])


def test_it_tells_the_hosts_that_it_lost(stand: Path) -> None:
    """While its ranks run. Without such a host they cannot start; of one without which they can it says nothing."""
    told: list[Supervisor] = []

    def lose(supervisor: Supervisor) -> None:
        told.append(supervisor)
        threading.Thread(target=end, daemon=True).start()

    def end() -> None:
        wait_until(lambda: len(list(stand.glob("starts-*"))) == 2)
        os.kill(int((stand / "ssh-far.invalid").read_text()), signal.SIGKILL)

    assert supervise(stand, "sleep 100", given(localhost=1, far=1), watch=lose) != 0
    assert told[0].how()["lost"] == ["far.invalid"]
    (stand / "down-far.invalid").touch()
    with pytest.raises(UserError, match=r"^host far.invalid: cannot be used: ssh: connect to host"):
        supervise(stand, "exit 0", given(localhost=1, far=1), min_ranks=2, watch=told.append)
    why = "ssh: connect to host far.invalid: No route to host"
    assert (told[1].how()["refused"], told[1].how()["lost"]) == ({"far.invalid": why}, [])
    assert supervise(stand, "exit 3", given(localhost=1, far=1), watch=told.append) == 3
    assert (told[2].how()["lost"], told[2].how()["hosts"]) == ([], ["localhost"])


def test_it_may_be_asked_to_stop_before_it_runs(stand: Path) -> None:
    asking: list[Supervisor] = []

    def ask(supervisor: Supervisor) -> None:
        asking.append(supervisor)
        supervisor.ask_to_stop(now=False)

    assert supervise(stand, "sleep 100", given(localhost=1), restarts=3, watch=ask) == 1
    assert not (stand / "starts-0").exists()
    assert (asking[0].how()["cause"], asking[0].how()["stopped"]) == ("it was asked to stop", "request")


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo wrong: x >&2; exit 2", "wrong: x"),
        ("echo KeyError >&2; exit 1", "rank 0 on host {} failed first, with exit code 1: KeyError"),
        ("echo unrelated >&2; kill -9 $$", "rank 0 on host {} failed first, with exit code 137 (SIGKILL)"),
        ("exit 3", "rank 0 on host {} failed first, with exit code 3"),
    ],
)
def test_the_cause_has_the_last_line_of_the_rank_that_failed_first(stand: Path, script: str, cause: str) -> None:
    told: list[Supervisor] = []
    assert supervise(stand, script, given(localhost=1), watch=told.append)
    assert told[0].how()["cause"] == cause.format(os.uname().nodename)


def test_it_tells_which_signal_has_stopped_it(stand: Path) -> None:
    told: list[Supervisor] = []
    script = f"kill -TERM {os.getpid()}; sleep 100"
    assert supervise(stand, script, given(localhost=1), restarts=3, watch=told.append) == 143
    assert starts(stand) == [1]
    assert (told[0].how()["cause"], told[0].how()["stopped"]) == ("it was asked to stop", "SIGTERM")


def test_a_host_that_is_back_without_its_data_is_refused_alone(stand: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def examine(hosts: Sequence[Host]) -> Mapping[str, Finding]:
        return refusing("far.invalid")(hosts) if (stand / "starts-0").exists() else {}

    script = "[ $start = 2 ] && exit 0; [ $HOROVOD_RANK = 3 ] && exit 1; sleep 100"
    assert supervise(stand, script, given(localhost=2, far=2), restarts=1, min_ranks=2, examine=examine) == 0
    assert starts(stand) == [4, 2]
    assert "data.source=x is not there; copy it there; excluded for" in capfd.readouterr().err


def test_a_host_whose_ranks_keep_failing_first_is_set_aside(stand: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "[ $HOROVOD_SIZE = 2 ] && exit 0; [ $HOROVOD_RANK = 3 ] && exit 1; sleep 100"
    assert supervise(stand, script, given(localhost=2, far=2), restarts=3, min_ranks=2) == 0
    assert starts(stand) == [4, 4, 2]
    said = capfd.readouterr().err
    assert "host far.invalid: its ranks failed first 2 times in a row; excluded for 10 s" in said


def test_a_rank_that_others_wait_for_failed_first(stand: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that is stopped ends neither itself nor the job; those that wait for it do."""
    stopped = beat(5, limit=3) + "sleep 100"
    waits = "sleep 4" + beat(5, limit=3, waits_for='"bucket 4"') + "exit 75"
    script = f"[ $HOROVOD_SIZE = 1 ] && exit 0; if [ $HOROVOD_RANK = 1 ]; then {stopped}; else {waits}; fi"
    assert supervise(stand, script, given(localhost=1, far=1), restarts=2) == 0
    assert starts(stand) == [2, 2, 1]
    said = capfd.readouterr().err
    assert f"rank 1 on host {os.uname().nodename} failed first, because no step ended within the limit" in said
    assert "host far.invalid: its ranks failed first 2 times in a row; excluded for 10 s" in said


def test_a_host_that_is_about_to_end_is_left_after_all_ranks_have_saved(
    stand: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        wait_until(lambda: len(list(stand.glob("ready-*"))) == 4)
        os.kill(int((stand / "ssh-far.invalid").read_text()), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    script = "[ $start = 2 ] && exit 0; "
    script += 'trap "sleep 0.5; touch saved-$HOROVOD_RANK; exit 1" TERM; touch ready-$HOROVOD_RANK; '
    script += "while :; do sleep 0.05; done"
    assert supervise(stand, script, given(localhost=2, far=2), restarts=1, min_ranks=2) == 0
    assert starts(stand) == [4, 2]
    assert len(list(stand.glob("saved-*"))) == 4
    said = capfd.readouterr().err
    assert "hvd-transformer: host far.invalid is about to end; excluded for 10 s" in said
    assert "failed first" not in said


def test_a_start_tells_which_earlier_ones_have_ended(stand: Path) -> None:
    script = 'echo "$HVD_TRANSFORMER_START,$HVD_TRANSFORMER_ENDED_STARTS" >>told-$HOROVOD_RANK; [ $start = 3 ]'
    assert supervise(stand, script, given(localhost=1), restarts=2) == 0
    names, ended = zip(*(line.split(",") for line in (stand / "told-0").read_text().splitlines()), strict=True)
    assert ended == ("", names[0], f"{names[0]} {names[1]}")
    assert len(set(names)) == 3


def test_launchers_of_the_same_job_name_their_starts_alike_but_not_the_same(stand: Path) -> None:
    script = 'echo "$HVD_TRANSFORMER_START" >>told'
    for job in ("7", "7", "", ""):
        assert supervise(stand, script, given(localhost=1), job_name=job) == 0
    names = (stand / "told").read_text().split()
    first, second, *others = (name.partition(".")[0] for name in names)
    assert (first, second) == ("7", "7") and len({first, *others}) == 3
    assert len(set(names)) == 4


def test_new_hosts_are_taken_in_after_the_ranks_have_saved(stand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_discovery, "_LOOK_SECONDS", 0.2)
    script = (
        'trap "touch saved; exit 1" TERM; touch ready; [ $HOROVOD_SIZE = 3 ] && exit 0; while :; do sleep 0.05; done'
    )

    def find() -> list[Host]:
        return given(localhost=1, far=8)() if (stand / "ready").exists() else given(localhost=1)()

    assert supervise(stand, script, find, num_ranks=3) == 0
    assert starts(stand) == [1, 3]
    assert (stand / "saved").exists()


def test_more_slots_of_a_host_are_taken_in_too(stand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_discovery, "_LOOK_SECONDS", 0.2)
    script = 'trap "exit 1" TERM; [ $HOROVOD_SIZE = 3 ] && exit 0; while :; do sleep 0.05; done'
    examined = []

    def find() -> list[Host]:
        return given(localhost=1, far=2)() if (stand / "starts-0").exists() else given(localhost=1, far=1)()

    def examine(hosts: Sequence[Host]) -> Mapping[str, Finding]:
        examined.append(hosts)
        return {}

    assert supervise(stand, script, find, num_ranks=4, examine=examine) == 0
    assert starts(stand) == [2, 3]
    assert examined[1] == [Host("localhost", 1), Host("far.invalid", 2)]


def test_a_new_host_that_cannot_be_used_is_named_and_the_job_goes_on(
    stand: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that does not answer, then without the data, then with it."""
    monkeypatch.setattr(host_discovery, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(host_pool, "COOL_DOWN_SECONDS", 0.1)
    (stand / "down-far.invalid").touch()
    examined = []

    def find() -> list[Host]:
        return given(localhost=1, far=1)() if (stand / "starts-0").exists() else given(localhost=1)()

    def examine(hosts: Sequence[Host]) -> Mapping[str, Finding]:
        examined.append(hosts)
        return refusing("far.invalid")(hosts) if len(examined) < 3 else {}  # the first one is the start's

    def answer() -> None:
        wait_until(lambda: "No route to host" in "".join(said.append(capfd.readouterr().err) or said))
        (stand / "down-far.invalid").unlink()

    said: list[str] = []
    answering = threading.Thread(target=answer)
    answering.start()
    script = "trap 'exit 1' TERM; [ $HOROVOD_SIZE = 2 ] && exit 0; for _ in $(seq 600); do sleep 0.05; done"
    assert supervise(stand, script, find, num_ranks=2, examine=examine) == 0
    answering.join()
    text = "".join(said) + capfd.readouterr().err
    lost, refused = "host far.invalid: cannot be used: ssh: connect to host", "host far.invalid: data.source=x is not"
    assert 0 <= text.index(lost) < text.index(refused) < text.index("new hosts: far.invalid")
    assert "excluded for 0 s" in text
    assert starts(stand) == [1, 2]


def test_a_signal_ends_the_job_without_a_restart(stand: Path) -> None:
    def interrupt() -> None:
        wait_until(lambda: len(list(stand.glob("ready-*"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    script = 'trap "exit 1" TERM; touch ready-$HOROVOD_RANK; while :; do sleep 0.05; done'
    assert supervise(stand, script, given(localhost=2), restarts=3, min_ranks=2) == 1
    assert starts(stand) == [2]


def write_script(folder: Path, text: str) -> Path:
    file = folder / "discover"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_ranks_that_save_for_longer_than_asked_for_are_killed(stand: Path) -> None:
    threading.Timer(4, os.kill, [os.getpid(), signal.SIGTERM]).start()
    began = time.monotonic()
    limits = TimeLimits(save=1.0)
    assert supervise(stand, "trap '' TERM; while :; do sleep 0.1; done", given(localhost=1), limits=limits) != 0
    assert time.monotonic() - began < 15


def test_a_discovery_script_names_the_hosts_of_now(tmp_path: Path) -> None:
    find = from_script(write_script(tmp_path, "echo a:2; echo 'b slots=3 # new'"), os.environ)
    assert find() == [Host("a", 2), Host("b", 3)]
    assert HostPool(find, 4).hosts() == [Host("a", 2), Host("b", 2)]
    assert from_script(write_script(tmp_path, "exit 0"), os.environ)() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo no list >&2; exit 3", "exit code 3: no list"),
        ("echo a:0", "line 1: '0' slots; a host has 1 to 1024"),
        ("sleep 30", "did not end within 3 seconds"),
    ],
)
def test_a_discovery_script_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr(host_pool, "_SCRIPT_SECONDS", 3.0)
    script = write_script(tmp_path, text)
    with pytest.raises(UserError) as raised:
        from_script(script, os.environ)()
    assert str(raised.value).startswith(f"--host-discovery-script {script}")
    assert str(raised.value).endswith(message)


def test_a_discovery_script_that_fails_as_a_rank_fails_does_not_end_the_job(stand: Path) -> None:
    """As when both come from a network that is away for a moment."""
    find = from_script(write_script(stand, f"[ -e {stand}/away ] && exit 1; echo localhost:2"), os.environ)

    def come_back() -> None:
        wait_until((stand / "away").exists, 60)
        time.sleep(3)
        (stand / "away").unlink()

    threading.Thread(target=come_back, daemon=True).start()
    script = f"[ $start = 2 ] && exit 0; {beat(5)} [ $HOROVOD_RANK = 0 ] && exec sleep 100; touch away; exit 7"
    assert supervise(stand, script, find, restarts=1) == 0
    assert starts(stand) == [2, 2]


def test_a_host_that_is_lost_again_is_left_alone_for_longer() -> None:
    hosts = HostPool(given(localhost=1, far=1), None)
    first = hosts.cool_down("far.invalid")
    assert hosts.cool_down("far.invalid") == 2 * first
    assert hosts.hosts() == [Host("localhost", 1)]
    assert json.dumps(first)


def joining(stand: Path, script: str, **options: object) -> int:
    """A job on this host, which another one joins once it runs."""

    def find() -> list[Host]:
        return given(localhost=1, far=1)() if (stand / "ready").exists() else given(localhost=1)()

    return supervise(stand, script, find, num_ranks=2, **options)


def test_ranks_that_do_not_save_in_time_are_not_said_to_have_saved(
    stand: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_discovery, "_LOOK_SECONDS", 0.2)
    script = "trap '' TERM; touch ready; [ $HOROVOD_SIZE = 2 ] && exit 0; while :; do sleep 0.05; done"
    assert joining(stand, script, limits=TimeLimits(save=1.0)) == 0
    assert starts(stand) == [1, 2]
    said = capfd.readouterr().err
    line = "the ranks did not save within 1 s (--save-timeout) and were killed; new hosts: far.invalid"
    assert line in said and "have saved" not in said


def test_a_rank_that_dies_while_it_saves_is_named(
    stand: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_discovery, "_LOOK_SECONDS", 0.2)
    script = "trap 'kill -9 $$' TERM; touch ready; [ $HOROVOD_SIZE = 2 ] && exit 0; while :; do sleep 0.05; done"
    assert joining(stand, script) == 0
    said = capfd.readouterr().err
    assert "with exit code 137 (SIGKILL) while the ranks saved; new hosts: far.invalid" in said


def test_a_new_host_that_is_gone_at_the_next_start_does_not_end_the_job(
    stand: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No rank has failed, so it takes no restart."""
    monkeypatch.setattr(host_discovery, "_LOOK_SECONDS", 0.2)
    script = (
        "trap 'touch down-far.invalid; kill $(cat ssh-far.invalid); exit 1' TERM; touch ready; "
        "[ $start = 2 ] && exit 0; while :; do sleep 0.05; done"
    )
    assert joining(stand, script, restarts=0) == 0
    assert starts(stand) == [1, 1]
    said = capfd.readouterr().err
    assert said.index("new hosts: far.invalid") < said.index("host far.invalid: cannot be used: ")
    assert "resuming: 1 ranks on localhost" in said


def test_what_is_said_before_a_rank_runs_is_no_beginning(stand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then errors appear on the terminal from which the job was detached."""

    def fail(*_: object) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(["sh", "-c", "exec >&-; sleep 1"], stdin=pipe, stdout=pipe, start_new_session=True)

    monkeypatch.setattr("hvd_transformer.launch.attempt._start", fail)
    begun = []
    monkeypatch.setattr(LaunchedJob, "begun", begun.append)
    assert supervise(stand, "exit 0", given(localhost=1)) == 1
    assert not begun and not (stand / "starts-0").exists()

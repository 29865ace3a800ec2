"""What the launcher learns of Horovod: the environment that Horovod's own launcher would give each rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shlex import split
from typing import Any

import pytest

HOROVODRUN = [sys.executable, "-m", "hvd_transformer.comm.horovodrun", "-np", "5", "-H", "a:2,b:3"]
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "NCCL_DEBUG": "INFO"}
# Their values differ from start to start, or are not of Horovod.
NOT_COMPARED = {"HOROVOD_GLOO_RENDEZVOUS_PORT", "PYTHONUNBUFFERED", "LC_CTYPE"}


def horovods_own(interfaces: list[str]) -> list[dict[str, str]]:
    """The environment of each rank, from the commands that `launch_gloo` would run over ssh."""
    pytest.importorskip("horovod.runner.gloo_run", reason="needs Horovod")
    from horovod.runner.common.util.settings import Settings
    from horovod.runner.gloo_run import launch_gloo

    commands: dict[int, str] = {}

    def keep(command: str, slot: Any, events: Any) -> tuple[int, float]:
        commands[slot.rank] = command
        return 0, 0.0

    settings = Settings(hosts="a:2,b:3", num_proc=5)
    launch_gloo(["hvd-train"], keep, settings, interfaces, ENVIRONMENT, "127.0.0.1")
    ranks = []
    for rank in range(5):
        env, *words = split(commands[rank])
        assert (env, words.pop()) == ("env", "hvd-train")
        ranks.append(dict(word.split("=", 1) for word in words))
    return ranks


def compared(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in NOT_COMPARED}


def test_the_ranks_get_what_horovodrun_would_give_them(tmp_path: Path) -> None:
    wanted = horovods_own(["lo"])
    words = [*HOROVODRUN, "--gloo", "--network-interfaces", "lo", "hvd-train"]
    with subprocess.Popen(
        words, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as horovodrun:
        assert horovodrun.stdin and horovodrun.stdout
        plan = json.loads(horovodrun.stdout.readline())
        assert horovodrun.poll() is None  # it serves the rendezvous
        assert int(plan["environment"]["HOROVOD_GLOO_RENDEZVOUS_PORT"]) > 0
        horovodrun.stdin.close()
        assert horovodrun.wait(10) == 0
    assert [compared({**plan["environment"], **rank}) for rank in plan["ranks"]] == list(map(compared, wanted))


def test_over_mpi_it_becomes_mpirun_without_asking_a_host(tmp_path: Path) -> None:
    """Its mpirun here prints its arguments."""
    pytest.importorskip("horovod.runner.launch", reason="needs Horovod")
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Open MPI" || echo "$@"\n')
    mpirun.chmod(0o755)
    words = [*HOROVODRUN, "--mpi", "--ssh-port", "2222", "--network-interfaces", "ib0,eth0", "runner", "a b"]
    environment = {**ENVIRONMENT, "PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    for part in ("-np 5 -H a:2,b:3", "plm_rsh_args -p 2222", "btl_tcp_if_include ib0,eth0", "-x NCCL_DEBUG"):
        assert part in done.stdout
    assert done.stdout.endswith(" runner a b\n")


def test_interfaces_keep_their_order_whatever_hosts_are_called() -> None:
    from hvd_transformer.comm.horovodrun import interfaces_of

    words = ["horovodrun", "-H", "node1-ib0:2,node2-ib0:2", "--network-interfaces", "eth0, ib0", "python"]
    assert interfaces_of(words) == ["eth0", "ib0"]
    assert interfaces_of(words[:3]) == []

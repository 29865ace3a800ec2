"""Doctor's sum of two ranks on two GPUs: where it is tried, and what its output means; a stand-in runs in its place."""

import asyncio
import os
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from waiting import is_running, wait_until

from hvd_transformer.config import load
from hvd_transformer.launch.connection.ssh import Ssh
from hvd_transformer.launch.doctor import gpu_allreduce
from hvd_transformer.launch.doctor.examine import examine
from hvd_transformer.launch.doctor.findings import Job
from hvd_transformer.launch.doctor.findings_table import as_table, to_json
from hvd_transformer.launch.doctor.gpu_allreduce import GpuAllreduce, about_gpu_allreduces, read, try_allreduce
from hvd_transformer.launch.horovodrun_command import Horovodrun, launcher_environment
from hvd_transformer.launch.hostfile import parse_hosts
from hvd_transformer.launch.node import probe

ANSWER: dict[str, Any] = {"devices": [{}, {}], "horovod": {"features": ["gloo", "MPI", "NCCL"]}}
RIGHT = "[0]<stdout>:the sum is right\n[1]<stdout>:the sum is right\n"
TRACE = """[1]<stderr>:Traceback (most recent call last):
[1]<stderr>:  File "<string>", line 9, in <module>
[1]<stderr>:horovod.common.exceptions.HorovodInternalError: ncclCommInitRank failed: unhandled system error
Process 1 exit with status code 1.
Traceback (most recent call last):
RuntimeError: Horovod detected that one or more processes exited with non-zero status
Exit code: 1
"""


def tried(answer: Mapping[str, Any], device: str = "auto", code: int | None = 0, output: str = RIGHT) -> GpuAllreduce:
    async def run(command: list[str], seconds: float) -> dict[str, Any]:
        assert command == gpu_allreduce.command()
        assert seconds > gpu_allreduce.SECONDS  # the ranks end by themselves first
        return {"code": code, "output": output}

    return asyncio.run(try_allreduce(device, answer, run))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_two_gpus_and_nccl_are_tried(device: str) -> None:
    assert str(tried(ANSWER, device)) == "right"


@pytest.mark.parametrize(
    ("device", "changed", "why"),
    [
        ("cpu", {}, "training.device=cpu"),
        ("auto", {"devices": []}, "no GPU"),
        ("cuda", {"devices": [{}]}, "one GPU"),
        ("auto", {"horovod": None}, "Horovod is not installed"),
        ("auto", {"horovod": {"features": ["gloo", "MPI"]}}, "Horovod is built without NCCL"),
        ("auto", {"horovod": {"features": []}}, "Horovod is built without gloo and NCCL"),
    ],
)
def test_what_is_not_tried_says_why(device: str, changed: dict[str, Any], why: str) -> None:
    result = tried({**ANSWER, **changed}, device, code=1)  # would be an error
    assert str(result) == f"not checked: {why}"
    assert about_gpu_allreduces({"a": result}) == []


@pytest.mark.parametrize(
    ("code", "output", "error"),
    [
        (1, TRACE, "horovod.common.exceptions.HorovodInternalError: ncclCommInitRank failed: unhandled system error"),
        (0, RIGHT.replace("right", "wrong", 1), "the sum is wrong"),
        (0, RIGHT.splitlines()[0], "the sum is right"),  # of one rank only
        (None, TRACE, "no answer within 60 seconds"),
        (1, "Process name: 1\nExit code: 142\n", "no answer within 60 seconds"),
        (127, "/venv/bin/horovodrun: No such file or directory", "/venv/bin/horovodrun: No such file or directory"),
        (1, "", "exit code 1"),
    ],
)
def test_ranks_that_cannot_add_up_are_a_problem_of_their_host(code: int | None, output: str, error: str) -> None:
    [finding] = about_gpu_allreduces({"a": GpuAllreduce(), "b": read({"code": code, "output": output})})
    assert finding[:2] == ("b", f"the allreduce of two GPUs failed: {error}")
    assert "-H b:2 -- bench allreduce" in finding.cure
    assert finding.problem


def test_a_command_that_hangs_is_ended_with_its_children() -> None:
    shell = "sleep 60 & echo started $!; wait"
    result = probe.run(["sh", "-c", shell], 3.0)
    assert result["code"] is None
    child = int(result["output"].split()[1])
    wait_until(lambda: not is_running(child), 10)
    assert probe.run(["/no/such/command"], 1) == {"code": 127, "output": "/no/such/command: No such file or directory"}


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (RIGHT, "allreduce of two GPUs: right"),
        ("[0]<stdout>:the sum is wrong", "problem localhost: the allreduce of two GPUs failed: the sum is wrong"),
        (None, "allreduce of two GPUs: not checked: no GPU"),
    ],
)
def test_the_examination_tries_it_on_the_host(
    printed: str | None, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = [sys.executable, "-c", f"print({printed!r})"]
    monkeypatch.setattr(gpu_allreduce, "command", lambda: stand_in)
    monkeypatch.setattr(gpu_allreduce, "why_not", lambda device, answer: None if printed else "no GPU")
    horovodrun = Horovodrun(parse_hosts("localhost:1"))
    job = Job.of(horovodrun, load(None, None, [f"output_dir={tmp_path}"]))
    found = examine(job, Ssh(), launcher_environment(os.environ, []))
    console = Console(width=200, file=StringIO())
    console.print(as_table(found, ["localhost"]))
    assert shown in console.file.getvalue()
    assert list(to_json(found)["gpu_allreduces"]) == ["localhost"]


@pytest.mark.distributed
@pytest.mark.slow
def test_two_real_ranks_add_up_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launcher_environment(os.environ, []).items():
        monkeypatch.setenv(name, value)
    assert read(probe.run(gpu_allreduce.command("cpu"), gpu_allreduce.SECONDS)) == GpuAllreduce()

"""Slurm as an engine: outputs that Slurm 22.05 has printed, and what its commands are given."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from engine_jobs import FakeCommands, job, submission

from hvd_transformer.errors import UserError
from hvd_transformer.service.engines.backend import Ended, EngineFault, OverLimit, Sighting
from hvd_transformer.service.engines.commands import CommandFailed, CommandMissing
from hvd_transformer.service.engines.slurm import Slurm

OVER_LIMIT = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)
# squeue --states=all --noheader --Format='JobID:|,State:|,exit_code:|,Name:|,NodeList:|,Reason:|'
SQUEUE = """\
1|COMPLETED|0|hvd-ok|h1|None|
2|FAILED|768|hvd-bad|h1|NonZeroExitCode|
3|FAILED|9|hvd-sig|h2|JobLaunchFailure|
5|PENDING|0|hvd-pend||Resources|
6|PENDING|0|hvd-big||PartitionConfig|
4|RUNNING|0|hvd-run|h[1-2]|None|
7|RUNNING|0|somebody-else|h3|None|
"""
# sacct --allocations --noheader --parsable2 --format=JobIDRaw,State,ExitCode,JobName,NodeList,Reason
SACCT = """\
12|NODE_FAIL|1:0|hvd-node|h[1-2]|None
13|CANCELLED by 1000|0:15|hvd-gone|h1|None
14|FAILED|75:0|hvd-75|h1|None
"""


def look(squeue: str, wanted: Mapping[str, str | None], sacct: str | EngineFault = "") -> Mapping[str, Sighting]:
    return Slurm(FakeCommands({"squeue": squeue, "sacct": sacct})).look(wanted)


def test_what_squeue_prints() -> None:
    names = ("ok", "bad", "sig", "pend", "big", "run")
    wanted = {f"hvd-{name}": str(number) for number, name in enumerate(names)}
    assert look(SQUEUE, wanted) == {
        "hvd-ok": Sighting("1", "Slurm job 1: COMPLETED", ended=Ended.EXITED, code=0),
        "hvd-bad": Sighting("2", "Slurm job 2: FAILED, exit code 3", ended=Ended.EXITED, code=3),
        "hvd-sig": Sighting("3", "Slurm job 3: FAILED, exit code 137", ended=Ended.EXITED, code=137),
        "hvd-pend": Sighting("5", "Slurm job 5: Resources"),
        "hvd-big": Sighting("6", "Slurm job 6: PartitionConfig"),
        "hvd-run": Sighting("4", "Slurm job 4 on h[1-2]", runs=True),
    }


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ("BOOT_FAIL", Ended.LOST),
        ("CANCELLED", Ended.CANCELLED),
        ("COMPLETING", None),
        ("CONFIGURING", None),
        ("DEADLINE", Ended.CANCELLED),
        ("NODE_FAIL", Ended.LOST),
        ("OUT_OF_MEMORY", Ended.EXITED),
        ("PREEMPTED", Ended.PREEMPTED),
        ("REVOKED", Ended.CANCELLED),
        ("SUSPENDED", None),
        ("TIMEOUT", Ended.TIME_LIMIT),
        ("A_STATE_OF_LATER", None),
    ],
)
def test_every_state(state: str, ended: Ended | None) -> None:
    found = look(f"8|{state}|0|hvd-x|h1|None|\n", {"hvd-x": "8"})["hvd-x"]
    assert (found.ended, found.runs) == (ended, state in ("COMPLETING", "SUSPENDED"))
    assert found.code == (1 if state == "OUT_OF_MEMORY" else None)
    assert state in found.words or found.runs


def test_jobs_that_squeue_has_forgotten_are_looked_up_at_once() -> None:
    commands = FakeCommands({"squeue": SQUEUE, "sacct": SACCT})
    wanted = {"hvd-run": "4", "hvd-node": "12", "hvd-gone": "13", "hvd-75": "14"}
    found = Slurm(commands).look(wanted)
    assert {name: (one.ended, one.code) for name, one in found.items()} == {
        "hvd-run": (None, None),
        "hvd-node": (Ended.LOST, None),
        "hvd-gone": (Ended.CANCELLED, None),
        "hvd-75": (Ended.EXITED, 75),
    }
    assert [words[0] for words in commands.called] == ["squeue", "sacct"]
    assert commands.called[1][-1] == "--jobs=12,13,14"


def test_attempts_that_may_have_been_submitted_are_looked_up_by_name(tmp_path: Path) -> None:
    """The service may have ended before it was told the id, and squeue has forgotten the job since."""
    commands = FakeCommands({"squeue": SQUEUE, "sacct": SACCT, "sbatch": EngineFault("sbatch: did not end")})
    slurm, wanted = Slurm(commands), {"hvd-75": None, "hvd-new": None}

    def asked_by_name() -> bool:
        commands.called.clear()
        found = slurm.look(wanted)
        assert found.keys() <= {"hvd-75"} and all(one.external == "14" for one in found.values())
        return any("--name=hvd-75,hvd-new" in words and "--starttime=now-30days" in words for words in commands.called)

    assert asked_by_name() and slurm.look({"hvd-new": None}) == {}
    assert not asked_by_name()  # what this service has submitted, squeue knows
    with pytest.raises(EngineFault):
        slurm.submit(submission(job(tmp_path), ""))
    assert asked_by_name() and not asked_by_name()
    commands.printed = {**commands.printed, "sbatch": "17"}
    slurm.submit(submission(job(tmp_path), ""))
    assert not asked_by_name()


@pytest.mark.parametrize(
    "fault",
    [CommandFailed("sacct: Slurm accounting storage is disabled"), CommandMissing("sacct: No such file or directory")],
)
def test_a_slurm_without_accounting_forgets(fault: EngineFault) -> None:
    assert look("", {"hvd-x": "8", "hvd-new": None}, fault) == {}
    assert Slurm(FakeCommands({})).gone("8").ended is Ended.EXITED
    with pytest.raises(EngineFault, match="sacct: away"):
        look("", {"hvd-x": "8"}, CommandFailed("sacct: away"))


def test_submit(tmp_path: Path) -> None:
    commands = FakeCommands({"sbatch": "17;cluster\n"})
    script = "#!/bin/bash\n#SBATCH --signal=B:USR1@180\ntrue\n"
    wanted = job(tmp_path, sbatch=("--partition=gpu",))
    sent = submission(wanted, script, seconds=3600.0, values={"TOKEN": "secret"}, code=tmp_path / "code")
    assert Slurm(commands).submit(sent) == "17"
    assert commands.called == [
        (
            "sbatch", "--parsable", "--job-name=hvd-abc-7-1", "--comment=tiny", "--no-requeue",
            f"--output={tmp_path}/run/.attempts/1.out", "--time=63", "--partition=gpu",
        )
    ]  # fmt: skip
    assert commands.texts == [script]
    expected = {
        "TOKEN": "secret",
        "HVD_TRANSFORMER_CODE": f"{tmp_path}/code",
        "HVD_TRANSFORMER_EXIT_FILE": f"{tmp_path}/run/.attempts/1.exit",
    }
    assert expected.items() <= commands.environments[0].items()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Batch job submission failed: Invalid partition name specified", UserError),
        ("Batch job submission failed: Requested node configuration is not available", UserError),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", EngineFault),
        ("Batch job submission failed: Socket timed out on send/recv operation", EngineFault),
        (OVER_LIMIT, OverLimit),
    ],
)
def test_what_sbatch_refuses_for_good_and_for_now(tmp_path: Path, message: str, kind: type[Exception]) -> None:
    commands = FakeCommands({"sbatch": CommandFailed(f"sbatch: error: {message}")})
    with pytest.raises(kind) as raised:
        Slurm(commands).submit(submission(job(tmp_path), ""))
    assert message in str(raised.value)
    assert isinstance(raised.value, OverLimit) == (kind is OverLimit)


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        ("QOSMaxSubmitJobPerUserLimit", OverLimit),
        ("AssocGrpSubmitJobsLimit", OverLimit),
        ("QOSMaxWallDurationPerJobLimit", UserError),
        ("AssocMaxNodePerJobLimit", UserError),
    ],
)
def test_a_job_over_a_limit_for_good_is_wrong_input_and_the_limit_is_named(
    tmp_path: Path, limit: str, kind: type[Exception]
) -> None:
    errors = f"sbatch: error: {limit}\nsbatch: error: {OVER_LIMIT}\n"
    commands = FakeCommands({"sbatch": CommandFailed(f"sbatch: error: {OVER_LIMIT}", errors)})
    with pytest.raises(kind) as raised:
        Slurm(commands).submit(submission(job(tmp_path), ""))
    assert str(raised.value).endswith(f"time limits): {limit}")


def test_stop_signals_what_runs_and_ends_what_waits() -> None:
    waits, runs = Sighting("5", ""), Sighting("4", "", runs=True)
    commands = FakeCommands({"scancel": ""})
    Slurm(commands).stop([waits, runs], now=False)
    assert commands.called == [
        ("scancel", "--quiet", "--batch", "--signal=TERM", "4"),
        ("scancel", "--quiet", "5"),
    ]
    commands.called.clear()
    Slurm(commands).stop([waits, runs], now=True)
    assert commands.called == [("scancel", "--quiet", "5", "4")]


def test_slurm_replaces_nothing_in_the_path_of_the_output(tmp_path: Path) -> None:
    commands = FakeCommands({"sbatch": "17"})
    Slurm(commands).submit(submission(job(tmp_path, output_dir="/runs/warm%up"), ""))
    assert "--output=/runs/warm%%up/.attempts/1.out" in commands.called[0]

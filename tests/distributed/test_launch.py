"""`hvd-transformer launch` on this machine: trains as bare horovodrun does, and ends better where something fails."""

import os
import re
import signal
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from commands import command
from conftest import BIN, rank_environment
from jobs import Job, started, state, steps, summary, tiny, write_corpus
from waiting import wait_until

from hvd_transformer.launch.attempt import AttemptResult, Stop, run_attempt
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.horovodrun_command import Horovodrun, launcher_environment
from hvd_transformer.launch.hostfile import Host

pytestmark = pytest.mark.distributed

LAUNCH = [BIN / "hvd-transformer", "launch"]
STEPS = 30
SECRET = "the-token-nobody-sees"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=12000)


@pytest.fixture(scope="module")
def bare(world, corpus, tmp_path_factory):
    """The run under plain horovodrun."""
    run = tmp_path_factory.mktemp("bare") / "run"
    world(2).train(settings(corpus, run))
    return run


def settings(corpus, run, num_steps=STEPS):
    return [*tiny(corpus), f"output_dir={run}", f"training.max_steps={num_steps}", "training.epochs=100"]


@contextmanager
def launched(tmp_path, options, words):
    """A launched job in the background; no process and no folder of it is left."""
    with started(1, [*LAUNCH, *options, "--", *words], "", tmp_path / "output") as job:
        yield job
        job.wait_gone(5)
        assert not private_folders(job.popen.pid)


def private_folders(launcher):
    return list(Path("/tmp").glob(f"hvd-transformer-{launcher}-*"))


def wait_for_step(job, run, step):
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_bytes().splitlines()) < step:
        assert job.popen.poll() is None, job.text()
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.02)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_trains_as_bare_horovodrun_does_and_shows_no_secret(bare, corpus, tmp_path, monkeypatch, backend):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("OTHER_TOKEN", "stays-here")
    run = tmp_path / "run"
    options = [
        "-np",
        "2",
        "-H",
        "localhost:4",
        f"--{backend}",
        "--env",
        "HF_TOKEN",
        "--timeline",
        tmp_path / "timeline",
    ]
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):  # the bare run's kernels, whose rounding differs
        if name in os.environ:
            options += ["--env", name]
    seen, given = set(), {}
    with launched(tmp_path, options, settings(corpus, run)) as job:
        while job.popen.poll() is None:
            seen |= set(command_lines())
            given |= training_environments(job)
            time.sleep(0.2)
        assert job.wait(1) == 0, job.text()
    assert steps(run, "loss", "lr") == steps(bare, "loss", "lr")
    assert [summary(run)[key] for key in ("status", "world", "backend")] == ["finished", 2, backend]
    assert (tmp_path / "timeline").stat().st_size > 0
    assert any("-m hvd_transformer.comm.horovodrun " in line and f" --{backend} " in line for line in seen)
    assert not [line for line in seen if SECRET in line or "stays-here" in line]
    assert SECRET not in job.text()
    assert len(given) == 2
    assert all(f"HF_TOKEN={SECRET}" in words for words in given.values())
    assert not any("OTHER_TOKEN=stays-here" in words for words in given.values())


def command_lines():
    """Of every process, as `ps` shows them."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield file.read_bytes().replace(b"\0", b" ").decode(errors="replace")


def training_environments(job: Job):
    """The environment of each hvd-train, by rank."""
    found = {}
    for process in job.processes():
        with suppress(OSError):
            program = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[:2]
            if any(word.endswith(b"/hvd-train") for word in program):
                words = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace").split("\0")
                found[process.rank] = words
    return found


@pytest.mark.parametrize("everybody", [False, True], ids=["the launcher is told", "every process is told"])
def test_a_signal_lets_the_ranks_save_and_leaves_no_process(corpus, tmp_path, everybody):
    """Slurm tells every process of a job, and its batch script tells the launcher once more."""
    run = tmp_path / "run"
    with launched(tmp_path, ["-np", "2"], settings(corpus, run, 100_000)) as job:
        wait_for_step(job, run, 20)
        for process in job.processes() if everybody else []:
            process.kill(signal.SIGTERM)
        job.popen.terminate()
        assert job.wait(30) == 1, job.text()
    last = steps(run, "loss")[-1][0]
    assert state(run)["position"]["step"] == last
    assert summary(run)["status"] == "stopped"
    assert f"stopped after step {last} (" in job.text()
    assert "everything is saved" in job.text()
    assert not re.search(r"^\[\d\].*Traceback", job.text(), re.MULTILINE)
    assert "failed first" not in job.text()


# The rest is true of any command: a shell starts faster than hvd-train.
RANK = "rank=${HOROVOD_RANK:-$OMPI_COMM_WORLD_RANK}; "


@pytest.fixture
def run_shell(tmp_path):
    """Runs a shell script on two ranks; no process and no folder of it is left."""

    def run_it(backend, script) -> AttemptResult:
        horovodrun = Horovodrun([Host("localhost", 2)], mpi=backend == "mpi")
        environment = {**launcher_environment(rank_environment(), []), "HOROVOD_TEST_JOB": str(tmp_path)}
        words, stop = ["sh", "-c", RANK + script], Stop()
        try:
            with closing(HostConnections(horovodrun.ssh, environment)) as connections:
                return run_attempt(horovodrun, words, {}, environment, connections, stop, lambda *printed: None, print)
        finally:
            stop.restore()

    yield run_it
    mark = f"HOROVOD_TEST_JOB={tmp_path}"
    wait_until(lambda: not any(has(file, mark) for file in Path("/proc").glob("[0-9]*/environ")))  # one may be ending
    assert not private_folders(os.getpid())


def has(file, mark):
    with suppress(OSError):
        return mark.encode() in file.read_bytes()
    return False


@pytest.mark.parametrize(("backend", "end", "code"), [("gloo", "kill -9 $$", 137), ("mpi", "exit 7", 7)])
def test_the_first_failing_ranks_own_code_is_passed_on(run_shell, backend, end, code):
    ended = run_shell(backend, f'[ "$rank" = 1 ] && {{ sleep 0.3; {end}; }}; sleep 100 & wait')
    assert (ended.code, ended.stopped) == (code, False)
    assert ended.first and ended.first[1:4] == (1, code, os.uname().nodename)


def test_ranks_get_more_time_to_save_than_mpirun_gives(run_shell, tmp_path):
    """It kills after a second."""
    save = f"sleep 2; touch {tmp_path}/saved-$rank; exit 3"

    def interrupt():
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)  # SIGINT may be ignored, as in a background job

    threading.Thread(target=interrupt, daemon=True).start()
    ended = run_shell("mpi", f'trap "{save}" TERM; touch {tmp_path}/ready-$rank; while :; do sleep 0.1; done')
    assert (ended.code, ended.stopped) == (3, True)
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "training.max_stepss=3"], "did you mean training.max_steps?"),
        (["-np", "3", "-H", "localhost:2"], "-np 3: the hosts have 2 slots"),
        (["-np", "0"], "-np 0: must be at least 1"),
        (
            ["-H", "no.such.host.invalid:1"],
            "host no.such.host.invalid: cannot be reached by ssh: unknown host name",
        ),
        (["--no-preflight", "-H", "no.such.host.invalid:1"], "host no.such.host.invalid: cannot be used: ssh: "),
        (["-H", "[::1]:2"], "[::1]: horovodrun knows no IPv6 addresses"),
        (["--env", "NO_SUCH_VARIABLE"], "--env NO_SUCH_VARIABLE: not set"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_before_anything_starts(words, message):
    done = command("hvd-transformer", "launch", *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("hvd-transformer: ")
    assert message in done.stderr

"""The commands of the service as users call them, against a service that answers as a test tells it."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from command_service import Asked, FakeService, attempt, event, fake_service, job, run
from commands import command
from conftest import BIN

from hvd_transformer.service.jobs import Host, Needs, Placement, State
from hvd_transformer.service.runs.index import run_id
from hvd_transformer.service.storage.store import NewJob, Store
from hvd_transformer.service.submitting.request import Request

Done = subprocess.CompletedProcess[str]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def service(state: Path) -> Iterator[FakeService]:
    with fake_service(state) as made:
        yield made


@pytest.fixture
def call(state: Path, tmp_path: Path) -> Any:
    """Runs `hvd-transformer` with these words in `tmp_path`."""

    def called(*words: object, code: int = 0, **environment: str) -> Done:
        variables = {"HVD_TRANSFORMER_SERVER": str(state), "HVD_TRANSFORMER_TOKEN": "", **environment}
        done = command("hvd-transformer", *words, folder=tmp_path, environment=variables)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return called


def test_submit(service: FakeService, call: Any, tmp_path: Path) -> None:
    service.answers["POST jobs"] = lambda asked: (201, {"ids": [7], "jobs": [job(7, reason="waits for job 3")]})
    done = call(
        "submit", "-np", "8", "--min-np", "4", "--name", "mine", "--priority", "-3", "--tag", "a", "--tag", "b",
        "--after", "3", "--after", "5-6", "--array", "seed=1,2", "--array", "optimizer.lr=1e-3,3e-4", "--time-limit",
        "12h", "--hold", "--max-retries", "1", "--env", "TOKEN", "--env-file", "values.env", "--mpi", "--restarts", "2",
        "--save-timeout", "5m", "--", "--preset", "tiny", "training.max_steps=5",
    )  # fmt: skip
    assert done.stdout == "job 7 (tiny-7): QUEUED: waits for job 3\n"
    (body,) = service.bodies("POST jobs")
    assert Request(**body) == Request(
        words=["--preset", "tiny", "training.max_steps=5"],
        launch=["--mpi", "--restarts", "2", "--save-timeout", "300.0"],
        folder=str(tmp_path),
        num_ranks=8,
        min_ranks=4,
        name="mine",
        priority=-3,
        tags=["a", "b"],
        after=[3, 5, 6],
        hold=True,
        time_limit=12 * 3600.0,
        array=["seed=1,2", "optimizer.lr=1e-3,3e-4"],
        env_names=["TOKEN"],
        env_file="values.env",
        max_retries=1,
    )
    assert service.asked[-1].headers["Idempotency-Key"]


def test_submit_to_another_scheduler(service: FakeService, call: Any, tmp_path: Path) -> None:
    service.answers["POST jobs"] = (201, {"ids": [7], "jobs": [job(7)]})
    call("submit", "--engine", "slurm", "-H", "a:2,b:2", "--sbatch=--partition=gpu", "--sbatch=--exclusive")
    call("submit", "--engine", "kubernetes", "-np", 2, "--image", "r/x", "--memory-gib", "8")
    slurm, kubernetes = (Request(**body) for body in service.bodies("POST jobs"))
    assert slurm == Request(
        folder=str(tmp_path),
        engine="slurm",
        launch=["-H", "a:2,b:2"],
        sbatch=["--partition=gpu", "--exclusive"],
    )
    assert kubernetes.launch == ["--image", "r/x", "--memory-gib", "8.0"]
    assert (kubernetes.engine, kubernetes.num_ranks) == ("kubernetes", 2)


def test_where_a_job_is_elsewhere(service: FakeService, call: Any) -> None:
    sent = job(7, "STARTING", engine="slurm", reason="Slurm job 12: Resources", sbatch=["--partition=gpu"])
    service.answers["GET jobs"] = {"items": [sent, job(8, reason="reserved for job 1")], "next": None}
    service.answers |= {"GET jobs/7": sent, "GET runs/000000000007": run(7)}
    first, second = call("queue").stdout.splitlines()[1:]
    assert first.endswith("slurm; Slurm job 12: Resources") and second.endswith("  reserved for job 1")
    shown = dict(line.split(maxsplit=1) for line in call("show", 7).stdout.splitlines() if len(line.split()) > 1)
    assert (shown["engine"], shown["why"]) == ("slurm", "Slurm job 12: Resources")


def test_submit_with_the_defaults(service: FakeService, call: Any, tmp_path: Path) -> None:
    service.answers["POST jobs"] = (201, {"ids": [7, 8], "jobs": [job(7), job(8)]})
    done = call("submit", "--np", 2, "--folder", "sub", "--json")
    assert [entry["id"] for entry in json.loads(done.stdout)["jobs"]] == [7, 8]
    assert Request(**service.bodies("POST jobs")[0]) == Request(folder=str(tmp_path / "sub"), num_ranks=2)


def test_what_the_service_refuses_is_one_line(service: FakeService, call: Any) -> None:
    line = "nonsense (command line): unknown key"
    service.answers["POST jobs"] = (400, {"error": line})
    done = call("submit", "--", "nonsense=1", code=2)
    assert (done.stdout, done.stderr) == ("", f"hvd-transformer: {line}\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("submit --engine slurm --image x", "--image: only with --engine kubernetes"),
        ("submit --engine pbs", "'pbs' is not one of"),
        ("submit -H h1:2", "-H: only with --engine slurm or kubernetes"),
        ("submit --detach", "No such option"),
        ("submit -np many", "'many' is not a valid integer"),
        ("submit --time-limit -5", "'-5' is not a duration above zero"),
        ("submit --after x", "'x' is not the number of a job"),
        ("cancel", "Missing argument 'JOB...'"),
        ("cancel 0", "'0' is not the number of a job, nor a range such as 12-40"),
        ("cancel 5-4", "must be a range of 1 to 10,000 jobs"),
        ("cancel 1-99999999999999", "must be a range of 1 to 10,000 jobs"),
        ("priority 7 high", "'high' is not a valid integer"),
        ("priority 7 1001", "1001 is not in the range -1000<=x<=1000"),
        ("logs 7 --rank x", "--rank x: must be the number of a rank, or launch"),
        ("logs 7 -f --json", "--json: not with --follow"),
        ("logs 7 --tail -1", "-1 is not in the range x>=0"),
        ("compare 7", "give 2 to 20 different jobs or runs to compare"),
        ("compare 7 7", "give 2 to 20 different jobs or runs to compare"),
        ("show nothing", "nothing: neither the number of a job nor a run directory nor the id of a run"),
        ("hosts add", "give either HOST:SLOTS,… or --hostfile"),
        ("hosts add h1:2 --gpus h1", "'h1' is not of the form HOST=0,1"),
        ("hosts --json drain h1", "--server and --json: put them behind hosts drain"),
        ("hosts drain", "Missing argument 'HOST...'"),
        ("token add x", "Missing option '--owner'"),
        ("token add x --owner ann --role root", "'root' is not one of"),
        ("token revoke x", "'x' is not a valid integer"),
        ("queue --state DONE", "'DONE' is not one of"),
        ("queue --user \udcff", "'\\udcff' is not valid UTF-8"),
        ("queue --server ftp://x", "--server ftp://x: must be like https://host:8080"),
    ],
)
def test_wrong_input(service: FakeService, call: Any, words: str, line: str) -> None:
    done = call(*words.split(), code=2)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert line in done.stderr


def queued(*jobs: dict[str, Any]) -> Any:
    """Answers for a listing."""

    def listing(asked: Asked) -> dict[str, Any]:
        wanted = ",".join(asked.query["state"]).split(",")
        found = [entry for entry in jobs if entry["state"] in wanted]
        return {"items": found, "next": None}

    return listing


RUNNING = job(
    3, "RUNNING", allocation=[{"host": "h1", "ranks": 2, "gpus": [0, 1]}, {"host": "h2", "ranks": 2, "gpus": []}]
)


def test_queue(service: FakeService, call: Any) -> None:
    waiting = job(
        4, reason="reserved for job 3", submitted=time.time() - 90.4, estimated_start=time.time() + 7230.4,
        needs={"num_ranks": 8, "min_ranks": 4, "tensor": 1, "gpus_per_rank": 0}, priority=5,
    )  # fmt: skip
    service.answers["GET jobs"] = queued(waiting, RUNNING, job(2, "SUCCEEDED"))
    header, *lines = call("queue").stdout.splitlines()
    assert header.split() == ["ID", "NAME", "USER", "STATE", "PRIORITY", "RANKS", "SUBMITTED", "HOSTS", "OR", "REASON"]
    assert lines[0].startswith("3   tiny-3  ann   RUNNING  0         4      ")
    assert lines[0].endswith("  h1:2 (gpus 0,1), h2:2")
    assert (
        lines[1]
        == "4   tiny-4  ann   QUEUED   5         4-8    "
        + "1m 30s ago".ljust(lines[0].index("h1:2") - lines[0].index("4      ") - 7)
        + "reserved for job 3; starts in 2h"
    )
    assert len(lines) == 2
    assert len(call("queue", "--all").stdout.splitlines()) == 4
    call("queue", "--state", "failed", "--user", "bob", "--tag", "x")
    assert service.asked[-1].query | {"limit": []} == {"state": ["FAILED"], "user": ["bob"], "tag": ["x"], "limit": []}
    document = json.loads(call("queue", "--json").stdout)
    assert document == {"jobs": [RUNNING, waiting]}


def test_a_name_cannot_do_anything_to_the_terminal(service: FakeService, call: Any) -> None:
    service.answers["GET jobs"] = queued(job(3, name="\x1b[2J[red]x\u202e", reason="a\nb"))
    out = call("queue").stdout
    assert "\x1b" not in out and "\u202e" not in out
    assert out.count("\n") == 2
    assert "[red]x" in out


def test_show(service: FakeService, call: Any) -> None:
    found = job(
        3, "RUNNING", allocation=RUNNING["allocation"], tags=["a", "b"], time_limit=7200.0, retries=1,
        attempts=[attempt(1, 75, cause="rank 2 stalled"), attempt(2, ended=None, last_step=None)],
    )  # fmt: skip
    checkpoints = [
        {"step": 5, "bytes": 3 << 20, "time": time.time() - 60.2, "best": True, "latest": True, "metrics": {}}
    ]
    its_run = run(3, job=RUNNING, late="rank 3 on host h2", checkpoints=checkpoints, estimated_end=time.time() + 600.4)
    service.answers |= {"GET jobs/3": found, f"GET runs/{found['run']}": its_run}
    out = call("show", 3).stdout
    for line in (
        "job         3",
        "state       RUNNING",
        "hosts       h1:2 (gpus 0,1), h2:2",
        "priority    0",
        "tags        a, b",
        "time limit  2h",
        "retries     1 of 3",
        "step     5 of 10",
        "ends     in 10m",
        "speed    1,234 tokens/s",
        "late     rank 3 on host h2",
        "loss     2.5",
    ):
        assert line in out.splitlines()
    rows = [line.split() for line in out.splitlines()]
    assert [row for row in rows if row[:1] == ["1"]][0][-5:] == ["0-10", "75", "rank", "2", "stalled"]
    assert "running" in [row for row in rows if row[:1] == ["2"]][0]
    assert ["5", "3.0", "MiB", "1m", "ago", "best", "latest"] in rows
    assert json.loads(call("show", 3, "--json").stdout) == {"job": found, "run": its_run}


def test_show_the_ranks_and_which_is_late(service: FakeService, call: Any) -> None:
    def rank(number: int, **fields: Any) -> dict[str, Any]:
        given = {"host": f"h{number % 2}", "step": 30, "phase": "forward", "waits_for": None, "age": 0.4}
        given |= {"memory": 3 << 20, "work_seconds": 0.08, "work_ratio": 1.0, "tokens_per_second": 9.5, "late": False}
        return {"rank": number, **given, **fields}

    number = run(3)["id"]
    late = rank(1, work_seconds=0.12, work_ratio=1.5, late=True)
    unknown = rank(2, memory=None, work_seconds=None, work_ratio=None)
    service.answers[f"GET runs/{number}"] = run(3, ranks=[rank(0), late, unknown])
    rows = [re.split(" {2,}", line) for line in call("show", number).stdout.splitlines()]
    first = rows.index(["RANK", "HOST", "STEP", "PHASE", "MEMORY", "WORK PER STEP", "HEARD FROM"]) + 1
    assert rows[first : first + 3] == [
        ["0", "h0", "30", "forward", "3 MiB", "80 ms (1.00x)", "0s ago"],
        ["1", "h1", "30", "forward", "3 MiB", "120 ms (1.50x)", "0s ago", "late"],
        ["2", "h0", "30", "forward", "0s ago"],
    ]
    # Of many ranks the late one and those with the most work.
    many = [rank(place, work_seconds=place / 1000, late=place == 7) for place in range(1000)]
    service.answers[f"GET runs/{number}"] = run(3, ranks=many)
    out = call("show", number).stdout
    shown = [int(word) for word in re.findall(r"^(\d+) +h[01] ", out, re.MULTILINE)]
    assert shown == [7, *range(985, 1000)]
    assert "16 of 1,000 ranks; --json has all\n" in out


def test_show_a_job_that_has_not_begun(service: FakeService, call: Any) -> None:
    found = job(3, reason="resources: needs 4 slots, 2 free")
    empty = run(3, "QUEUED", job=found, step=None, total_steps=None, metrics={}, began=None, tokens_per_second=None)
    service.answers |= {"GET jobs/3": found, f"GET runs/{found['run']}": empty}
    assert "why         resources: needs 4 slots, 2 free" in call("show", 3).stdout.splitlines()
    assert json.loads(call("show", 3, "--json").stdout)["run"] is None


def test_show_a_run_without_a_job(service: FakeService, call: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    number = run_id(tmp_path / "runs" / "mine")
    service.answers[f"GET runs/{number}"] = run(1, "FINISHED", id=number, name="mine")
    by_path, by_id = call("show", "runs/mine").stdout, call("show", number).stdout
    assert by_path == by_id
    assert by_path.splitlines()[1:3] == ["name     mine", "state    FINISHED"]


def test_a_run_directory_that_the_service_does_not_have_is_read_here(
    service: FakeService, state: Path, tmp_path: Path
) -> None:
    """Where the service is that of this user; one that was named is asked alone."""
    for name, rate in (("one", 0.1), ("other", 0.3)):
        small_run(tmp_path / "runs" / name, rate, 2.0)
        service.answers[f"GET runs/{run_id(tmp_path / 'runs' / name)}"] = (404, {"error": "no such run"})

    def call(*words: str) -> Done:
        own = {"XDG_DATA_HOME": str(tmp_path), "HVD_TRANSFORMER_SERVER": ""}
        return command("hvd-transformer", *words, folder=tmp_path, environment=own)

    (tmp_path / "hvd-transformer").mkdir()
    (tmp_path / "hvd-transformer" / "service").symlink_to(state)
    assert json.loads(call("show", "runs/one", "--json").stdout)["run"]["step"] == 3
    found = json.loads(call("compare", "runs/one", "runs/other", "--json").stdout)
    assert found["differs"]["optimizer.lr"] == [0.1, 0.3]
    named = call("show", "runs/one", "--server", str(state))
    assert (named.returncode, named.stderr) == (2, "hvd-transformer: runs/one: the service has no such run\n")
    assert "the service has no such run" in call("compare", "runs/one", "a" * 12).stderr


def log_of(texts: list[str]) -> Any:
    """A log that grows by one text at every look, as the service pages it."""
    looks = iter(texts)
    written = ""

    def page(asked: Asked) -> Any:
        nonlocal written
        written += next(looks, "")
        offset = int(asked.query.get("offset", ["0"])[0])
        if "tail" in asked.query:
            offset = max(0, len(written) - int(asked.query["tail"][0]))
        text = written[offset:][: int(asked.query.get("limit", ["10"])[0])]
        return {"text": text, "offset": offset, "next": offset + len(text), "size": len(written)}

    return page


def test_logs(service: FakeService, call: Any) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    service.answers |= {"GET jobs/3": RUNNING, f"GET runs/{RUNNING['run']}/log": log_of([text])}
    assert call("logs", 3).stdout == text
    assert service.asked[-1].query["rank"] == ["launch"]
    assert call("logs", 3, "--rank", 2, "--tail", 3).stdout == "line 97\nline 98\nline 99\n"
    assert service.asked[-1].query["rank"] == ["2"]
    assert call("logs", 3, "-n", 0).stdout == ""
    assert call("logs", 3, "-n", 1000).stdout == text
    document = json.loads(call("logs", 3, "--json", "-n", 1).stdout)
    assert document == {"run": RUNNING["run"], "rank": "launch", "text": "line 99\n", "next": len(text)}


def test_logs_that_are_not_there(service: FakeService, call: Any) -> None:
    service.answers |= {"GET jobs/3": RUNNING, f"GET runs/{RUNNING['run']}/log": (404, {"error": "has no log"})}
    assert call("logs", 3, code=2).stderr == "hvd-transformer: has no log\n"
    service.answers["GET jobs/3"] = job(3, "CANCELLED", run=RUNNING["run"])
    assert call("logs", "-f", 3, code=2).stderr == "hvd-transformer: has no log\n"


def test_logs_are_followed_until_the_job_ends(service: FakeService, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_transformer.cli.logs._LOOK_SECONDS", 0.0)
    states = iter([job(3), job(3), *3 * [job(3, "RUNNING")]])
    service.answers["GET jobs/3"] = lambda asked: next(states, job(3, "SUCCEEDED"))
    log = log_of(["one\n", "", "two\n", "three\n", "four\n", "", "five\n"])
    pages = iter([(404, {"error": "no log yet"})])
    service.answers[f"GET runs/{job(3)['run']}/log"] = lambda asked: next(pages, None) or log(asked)
    done = call("logs", "-f", 3)
    assert done.stdout.startswith("one\ntwo\nthree\nfour\n")
    assert done.stderr == ""


def test_a_log_that_is_replaced_is_read_from_its_beginning(
    service: FakeService, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_transformer.cli.logs._LOOK_SECONDS", 0.0)
    pages = [
        {"text": "old old\n", "offset": 0, "next": 8, "size": 8},
        {"text": "", "offset": 8, "next": 8, "size": 8},
        {"text": "new\n", "offset": 0, "next": 4, "size": 4},
        {"text": "new\n", "offset": 0, "next": 4, "size": 4},
        {"text": "", "offset": 4, "next": 4, "size": 4},
    ]
    states = iter([RUNNING, RUNNING])
    service.answers["GET jobs/3"] = lambda asked: next(states, job(3, "FAILED", run=RUNNING["run"]))
    service.answers[f"GET runs/{RUNNING['run']}/log"] = lambda asked: pages.pop(0)
    assert call("logs", "-f", 3).stdout == "old old\nnew\n"


def test_logs_are_followed_over_a_restart_of_the_service(
    state: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, pauses = log_of(["one\n", "", "two\n"]), []

    def answers(found: dict[str, Any]) -> dict[str, Any]:
        return {"GET jobs/3": found, f"GET runs/{RUNNING['run']}/log": log}

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            first.close()
        elif len(pauses) == 3:
            second.enter_context(fake_service(state)).answers |= answers(job(3, "SUCCEEDED", run=RUNNING["run"]))

    with ExitStack() as first, ExitStack() as second:
        first.enter_context(fake_service(state)).answers |= answers(RUNNING)
        monkeypatch.setattr("hvd_transformer.cli.logs.time.sleep", pause)
        done = call("logs", "-f", 3)
    assert done.stdout == "one\ntwo\n"
    assert done.stderr == (
        f"hvd-transformer: {state}: no service is running; start it with hvd-transformer serve; still waiting\n"
    )


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (job(3, "SUCCEEDED", attempts=[attempt(code=0)]), 0),
        (job(3, "FAILED", attempts=[attempt(1, 75), attempt(2, 3)]), 3),
        (job(3, "FAILED", attempts=[attempt(code=0)]), 1),  # its time was up
        (job(3, "FAILED", attempts=[attempt(code=-9)]), 137),
        (job(3, "CANCELLED"), 1),
        (job(3, "CANCELLED", attempts=[attempt(code=0)]), 1),
    ],
)
def test_wait_has_the_exit_code_of_the_job(service: FakeService, call: Any, found: dict[str, Any], code: int) -> None:
    service.answers["GET jobs/3"] = found
    assert call("wait", 3, code=code).stdout == f"job 3 (tiny-3): {found['state']}\n"


def test_wait_for_several(service: FakeService, call: Any) -> None:
    now = {3: "RUNNING", 4: "QUEUED", 5: "SUCCEEDED"}
    codes = {3: 7, 4: 2, 5: 0}
    for number in now:
        service.answers[f"GET jobs/{number}"] = lambda asked, number=number: job(
            number, now[number], attempts=[attempt(code=codes[number])]
        )
    ended = iter([4, 9, 3])

    class Stream(list[bytes]):
        """Ends a job when the event of it is sent."""

        def __iter__(self) -> Iterator[bytes]:
            yield b": events\n\n"
            for number in ended:
                now[number] = "FAILED"
                yield event("job", id=number, state="FAILED", run="a")
            yield b": ping\n\n"

    service.streams = [Stream()]
    done = call("wait", "3-5", "--json", code=7)
    document = json.loads(done.stdout)
    assert (document["codes"], document["code"]) == ([7, 2, 0], 7)
    assert [entry["id"] for entry in document["jobs"]] == [3, 4, 5]
    assert len([asked for asked in service.asked if asked.what == "GET events"]) == 1


@pytest.mark.parametrize("told", ["event", "resync", "ping"])
def test_wait_asks_for_each_job_a_few_times(service: FakeService, call: Any, told: str) -> None:
    """One of many ends at each ping, of which an event tells, or it was lost."""
    count, now = 40, dict[int, str]()
    for number in range(1, count + 1):
        service.answers[f"GET jobs/{number}"] = lambda asked, number=number: job(number, now.get(number, "RUNNING"))

    class Stream(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield b": events\n\n"
            for number in range(1, count + 1):
                now[number] = "SUCCEEDED"
                if told == "event":
                    yield event("job", id=number, state="SUCCEEDED", run="a")
                yield b": ping\n\n"
            if told == "resync":
                yield event("resync")
            for _ in range(2 * count):
                yield b": ping\n\n"

    service.streams = [Stream()]
    done = call("wait", f"1-{count}")
    assert len(done.stdout.splitlines()) == count
    assert sum(asked.what.startswith("GET jobs/") for asked in service.asked) <= 4 * count


def test_wait_survives_a_restart_of_the_service(state: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            first.close()
        else:
            second.enter_context(fake_service(state)).answers["GET jobs/3"] = job(3, "SUCCEEDED")

    with ExitStack() as first, ExitStack() as second:
        first.enter_context(fake_service(state)).answers["GET jobs/3"] = RUNNING
        monkeypatch.setattr("hvd_transformer.cli.wait.time.sleep", pause)
        done = call("wait", 3)
    assert done.stdout == "job 3 (tiny-3): SUCCEEDED\n"
    assert done.stderr == (
        f"hvd-transformer: {state}: no service is running; start it with hvd-transformer serve; still waiting\n"
    )


def test_wait_for_a_job_that_is_not_there(service: FakeService, call: Any) -> None:
    service.answers["GET jobs/3"] = (404, {"error": "job 3: no such job"})
    assert call("wait", 3, code=2).stderr == "hvd-transformer: job 3: no such job\n"


@pytest.mark.parametrize(
    ("words", "body", "line"),
    [
        ("cancel 7 9-10", {"ids": [7, 9, 10], "action": "cancel", "now": False}, "job 7: is being cancelled"),
        ("cancel 7 7 --now", {"ids": [7], "action": "cancel", "now": True}, "job 7: is being cancelled"),
        ("hold 7", {"ids": [7], "action": "hold"}, "job 7: is on hold"),
        ("release 7", {"ids": [7], "action": "release"}, "job 7: is queued"),
        ("retry 7", {"ids": [7], "action": "retry"}, "job 7: is queued again"),
    ],
)
def test_changes(service: FakeService, call: Any, words: str, body: dict[str, Any], line: str) -> None:
    service.answers["POST jobs/bulk"] = {"done": [7], "errors": {}}
    assert call(*words.split()).stdout == f"{line}\n"
    assert service.bodies("POST jobs/bulk") == [body]
    answer = service.answers["POST jobs/bulk"] = {"done": [], "errors": {"7": "job 7 is bob's", "9": "has ended"}}
    done = call(*words.split(), "--json", code=2)
    assert json.loads(done.stdout) == answer
    assert done.stderr == "hvd-transformer: job 7 is bob's\nhvd-transformer: job 9: has ended\n"


def test_priority(service: FakeService, call: Any) -> None:
    service.answers["POST jobs/7/priority"] = lambda asked: job(7, priority=asked.body["priority"])
    assert call("priority", 7, -5).stdout == "job 7: has priority -5\n"
    assert json.loads(call("priority", 7, 5, "--json").stdout) == job(7, priority=5)


HOSTS = {
    "items": [
        {
            "name": "h1", "slots": 4, "gpus": [0, 1], "threads": 0, "drained": False, "down": "", "load": 1.5,
            "used": [
                {"job": 3, "run": "a", "ranks": 2, "gpus": [0, 1], "owner": "ann", "name": "tiny"},
                {"job": None, "run": None, "ranks": 1, "gpus": [], "owner": "", "name": "a launch outside the queue"},
            ],
            "findings": ["clock is off", "disk is full"],
        },
        {"name": "h2", "slots": 2, "gpus": [], "threads": 0, "drained": True, "down": "", "load": None, "used": [],
         "findings": []},
        {"name": "h3", "slots": 2, "gpus": [], "threads": 0, "drained": True, "down": "no answer", "load": None,
         "used": [], "findings": []},
    ]
}  # fmt: skip


def test_hosts(service: FakeService, call: Any) -> None:
    service.answers["GET hosts"] = HOSTS
    _, first, second, third = call("hosts").stdout.splitlines()
    assert first.split("  ")[0] == "h1"
    assert first.endswith("3 (ann): 2 on gpus 0,1, a launch outside the queue: 1  clock is off; disk is full")
    assert second.split() == ["h2", "2", "0", "drained"]
    assert third.split() == ["h3", "2", "0", "down:", "no", "answer"]
    assert json.loads(call("hosts", "--json").stdout) == HOSTS


def test_hosts_are_changed(service: FakeService, call: Any, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h1 slots=4 gpus=0,1,2,3\nh2:2\n")
    service.answers |= {"POST hosts": HOSTS, "POST hosts/h1/drain": HOSTS, "POST hosts/h2/drain": HOSTS}
    assert call("hosts", "add", "h[1-2]:4", "--gpus", "h1=0,1").stdout == "h[1-2]:4: added\n"
    call("hosts", "add", "--hostfile", "hosts", "--gpus", "h2=7")
    assert service.bodies("POST hosts") == [
        {"hosts": "h[1-2]:4", "gpus": {"h1": [0, 1]}},
        {"hosts": "h1:4,h2:2", "gpus": {"h1": [0, 1, 2, 3], "h2": [7]}},
    ]
    assert call("hosts", "drain", "h1", "h2").stdout == "h1: takes no new jobs\nh2: takes no new jobs\n"
    assert json.loads(call("hosts", "drain", "h1", "--json").stdout) == HOSTS
    service.answers["POST hosts/h1/remove"] = (409, {"error": "h1: job 3 uses it"})
    assert call("hosts", "remove", "h1", code=2).stderr == "hvd-transformer: h1: job 3 uses it\n"
    service.answers["POST hosts/h1/resume"] = HOSTS
    assert call("hosts", "resume", "h1").stdout == "h1: takes jobs\n"


def test_compare(service: FakeService, call: Any) -> None:
    service.answers |= {
        "GET jobs/3": RUNNING,
        f"GET runs/{'b' * 12}": run(11, id="b" * 12),
        "GET compare": {
            "runs": [run(3), run(11, "FINISHED")],
            "differs": {"optimizer.lr": [0.001, None], "data.split": [[0.9, 0.1], "x"]},
            "final": {"loss": [2.5, None]},
        },
    }
    lines = [line.split() for line in call("compare", 3, "b" * 12).stdout.splitlines()]
    assert lines == [
        ["tiny-3", "tiny-11"], ["state", "RUNNING", "FINISHED"], ["step", "5", "5"], ["optimizer.lr", "0.001", "none"],
        ["data.split", "[0.9,", "0.1]", "x"], ["loss", "2.5"],
    ]  # fmt: skip
    assert service.asked[-1].query == {"runs": [f"{RUNNING['run']},{'b' * 12}"]}


def test_tokens(service: FakeService, call: Any) -> None:
    row = {"id": 2, "name": "laptop", "owner": "ann", "role": "view", "created": 1e9, "expires": None}
    service.answers |= {
        "POST tokens": (201, {"token": "secret"}), "GET tokens": {"items": [row]}, "DELETE tokens/2": (204, b""),
    }  # fmt: skip
    assert call("token", "add", "laptop", "--owner", "ann", "--role", "view").stdout == "secret\n"
    call("token", "add", "short", "--owner", "bob", "--expires", "2h")
    first, second = service.bodies("POST tokens")
    assert first == {"name": "laptop", "owner": "ann", "role": "view", "expires": None}
    assert second["role"] == "submit"
    assert 0 < second["expires"] - time.time() <= 7200
    assert call("token", "list").stdout.splitlines()[1].split()[:4] == ["2", "laptop", "ann", "view"]
    assert call("token", "revoke", 2).stdout == "token 2: revoked\n"


@pytest.mark.parametrize(
    "words",
    [
        "submit",
        "cancel 7",
        "logs 7",
        "wait 7",
        "hosts",
        "hosts drain h1",
        "token list",
        "priority 7 1",
        "queue",
        "show 7",
    ],
)
def test_without_a_service(call: Any, state: Path, words: str) -> None:
    done = call(*words.split(), code=2)
    assert done.stderr == f"hvd-transformer: {state}: no service is running; start it with hvd-transformer serve\n"


def small_run(folder: Path, lr: float, loss: float) -> None:
    """A run directory that has ended."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"task: language_model\noptimizer: {{lr: {lr}}}\n")
    lines = [{"step": step, "samples": 8 * step, "loss": loss + 1 / step} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"status": "finished", "steps": 3, "samples": 24}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def stopped(state: Path, tmp_path: Path) -> Path:
    """The state folder of a service that has run: job 1 has run on h1, job 2 waits."""
    small_run(tmp_path / "runs" / "one", 0.1, 2.0)
    store = Store(state / "service.db")
    try:
        store.put_hosts([Host("h1", 4)])
        for number, lr in ((1, 0.1), (2, 0.2)):
            name = {1: "one", 2: "two"}[number]
            config = {"task": "language_model", "optimizer.lr": lr}
            store.add_jobs(
                [NewJob(name, "ann", 1e9, Needs(2, 2), str(tmp_path / "runs" / name), "/", ("seed=1",), config=config)],
                None,
            )
        store.start(1, (Placement("h1", 2),), 1e9)
        store.update(1, state=State.RUNNING)
        store.set_waits({2: "resources: needs 2 slots"}, {})
    finally:
        store.close()
    return state


def test_listings_work_while_the_service_is_down(stopped: Path, call: Any, tmp_path: Path) -> None:
    done = call("queue")
    note = "no service is running; start it with hvd-transformer serve; this is what its database has"
    assert done.stderr == f"hvd-transformer: {stopped}: {note}\n"
    running, waiting = done.stdout.splitlines()[1:]
    assert running.split()[:4] == ["1", "one", "ann", "RUNNING"] and running.endswith("h1:2")
    assert waiting.endswith("resources: needs 2 slots")
    document = json.loads(call("queue", "--json", "--state", "QUEUED").stdout)
    assert [(entry["id"], entry["output_dir"]) for entry in document["jobs"]] == [(2, f"{tmp_path}/runs/two")]

    shown = json.loads(call("show", 1, "--json").stdout)
    assert shown["job"]["attempts"][0]["allocation"] == [{"host": "h1", "ranks": 2, "gpus": []}]
    assert (shown["run"]["step"], shown["run"]["metrics"]["loss"]) == (3, pytest.approx(2 + 1 / 3))
    assert json.loads(call("show", "runs/one", "--json").stdout)["job"]["id"] == 1
    assert json.loads(call("show", 2, "--json").stdout)["run"] is None
    assert call("show", 9, code=2).stderr.endswith("job 9: no such job\n")
    assert call("show", "9" * 20, code=2).stderr.endswith(f"job {'9' * 20}: no such job\n")
    assert "give the run's directory or the number of its job" in call("show", "a" * 12, code=2).stderr


def test_run_directories_need_no_service(call: Any, state: Path, tmp_path: Path) -> None:
    """Nor one that has ever run: nothing is left in its place."""
    small_run(tmp_path / "runs" / "one", 0.1, 2.0)
    small_run(tmp_path / "runs" / "other", 0.3, 1.0)
    found = json.loads(call("compare", "runs/one", "runs/other", "--json").stdout)
    assert found["differs"]["optimizer.lr"] == [0.1, 0.3]
    done = call("show", "runs/one", "--json")
    assert (json.loads(done.stdout)["run"]["step"], done.stderr) == (3, "")
    assert not (state / "service.db").exists()
    (tmp_path / "empty").mkdir()
    assert call("show", "empty", code=2).stderr.endswith(f"{tmp_path}/empty: not a run directory\n")
    assert "no service is running" in call("compare", "1", "runs/one", code=2).stderr
    assert "no service is running" in call("show", "~nobody-here/run", code=2).stderr


def test_runs_are_compared_while_the_service_is_down(stopped: Path, call: Any, tmp_path: Path) -> None:
    small_run(tmp_path / "runs" / "other", 0.3, 1.0)
    found = json.loads(call("compare", "1", "2", "runs/other", "--json").stdout)
    assert found["differs"]["optimizer.lr"] == [0.1, 0.2, 0.3]
    assert found["final"]["loss"] == pytest.approx([2 + 1 / 3, None, 1 + 1 / 3])
    assert [entry["state"] for entry in found["runs"]][:2] == ["RUNNING", "QUEUED"]
    (tmp_path / "empty").mkdir()
    assert call("compare", "1", "empty", code=2).stderr.endswith(f"{tmp_path}/empty: not a run directory\n")


def test_tags_of_a_run_without_a_job_are_shown_while_the_service_is_down(
    stopped: Path, call: Any, tmp_path: Path
) -> None:
    small_run(tmp_path / "runs" / "other", 0.3, 1.0)
    with closing(Store(stopped / "service.db")) as store:
        store.tag_runs([run_id(tmp_path / "runs" / "other")], ["paper", "july"])
    assert json.loads(call("show", "runs/other", "--json").stdout)["run"]["tags"] == ["july", "paper"]


def test_only_the_database_of_this_host_is_read(stopped: Path, call: Any) -> None:
    done = call("queue", code=2, HVD_TRANSFORMER_SERVER="http://127.0.0.1:1", HVD_TRANSFORMER_TOKEN="x")
    assert done.stderr == "hvd-transformer: http://127.0.0.1:1: no service answers: Connection refused\n"


def test_tables_on_a_terminal(service: FakeService, state: Path) -> None:
    """In colour, and as wide as the terminal."""
    service.answers["GET jobs"] = queued(RUNNING, job(4, name="[bold]x[/bold]"))
    words = [str(BIN / "hvd-transformer"), "queue", "--server", str(state)]
    script = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm-256color", "COLUMNS": "120", "LANG": "C.UTF-8"}
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b[32mRUNNING" in done.stdout
    assert "[bold]x[/bold]" in done.stdout

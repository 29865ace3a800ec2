"""Trackers have each step once, whatever happened to the job, to their processes or to their servers."""

import errno
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import wandb_files
from commands import command

from hvd_transformer.config import load
from hvd_transformer.config.schema import flatten
from hvd_transformer.errors import UserError
from hvd_transformer.reporting.metrics_log import MetricsLog, read_rows
from hvd_transformer.reporting.trackers import processes, tracker_process
from hvd_transformer.reporting.trackers.mlflow_tracker import MlflowTracker
from hvd_transformer.reporting.trackers.processes import Trackers, run_id
from hvd_transformer.reporting.trackers.tracker import Job, Row, without_passwords
from hvd_transformer.reporting.trackers.tracker_process import Rows, TrackerProcess
from hvd_transformer.reporting.trackers.wandb_tracker import WandbTracker

# As rank 0: writes the steps from one after the checkpoint on, then ends or waits to be killed.
RANK_0 = """
import sys
from pathlib import Path
from hvd_transformer.config import load
from hvd_transformer.reporting.metrics_log import MetricsLog
from hvd_transformer.reporting.trackers import processes
from hvd_transformer.reporting.trackers.processes import Trackers

processes._END_SECONDS = 250.0  # however slow this machine is
folder, resumed, last, ends = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "ends"
names = sys.argv[5].split(",")
trackers = Trackers(names)
trackers.check()
(folder / "logs").mkdir(parents=True, exist_ok=True)
log = MetricsLog(folder, resumed, print)
trackers.follow(folder, load(overrides=[f"tracking={names}"]), resumed)
for step in range(resumed + 1, last + 1):
    log.write(step, loss=1 / step, lr=float(step))
    if step % 5 == 0:
        log.write(step, valid_loss=2 / step)
if ends:
    trackers.end("finished", {"status": "finished", "steps": last, "test_loss": 0.5}, print)
else:
    print(*[process.pid for process in trackers._processes.values()], flush=True)
    sys.stdin.read()
"""
KILLED_AT, CHECKPOINT, LAST = 30, 12, 40


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow") / "runs.db"


@pytest.fixture
def environment(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Without network, and without what this machine's user may have set."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    chosen = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{database}",
        "MLFLOW_EXPERIMENT_NAME": tmp_path.name,
        "HOME": str(tmp_path),
    }
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    return chosen


def of_mlflow(database: Path, experiment: str) -> list[dict[str, list[tuple[int, float]]]]:
    """The metrics of each run of an experiment, by MLflow's own client."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{database}")
    found = client.get_experiment_by_name(experiment)
    return [
        {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics}
        for run in client.search_runs([found.experiment_id])
    ]


def of_wandb(folder: Path) -> Path:
    (file,) = folder.glob("wandb/*run-*/run-*.wandb")
    return file


def wait_for_step(database: Path, step: int) -> None:
    """Until MLflow has it."""
    while True:
        try:
            with sqlite3.connect(database) as connection:
                if connection.execute("select 1 from metrics where key = 'loss' and step = ?", (step,)).fetchone():
                    return
        except sqlite3.Error:  # no tables yet
            pass
        time.sleep(0.2)


def kill_and_resume(folder: Path, names: Sequence[str], who: str, wait: Callable[[], object]) -> None:
    """Kills rank 0 after the wait, with the trackers or without; the next start resumes from the checkpoint."""

    def words(resumed: int, last: int, ends: str) -> list[str]:
        return [sys.executable, "-c", RANK_0, str(folder), str(resumed), str(last), ends, ",".join(names)]

    first = subprocess.Popen(words(0, KILLED_AT, "waits"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with first:
        assert first.stdout is not None
        trackers = [int(word) for word in first.stdout.readline().split()]
        wait()
        assert len(trackers) == len(names)
        for process in trackers if who != "rank 0" else []:
            os.kill(process, signal.SIGKILL)
        first.kill()
    subprocess.run(words(CHECKPOINT, LAST, "ends"), check=True, timeout=200)


@pytest.mark.parametrize("who", [pytest.param("rank 0", marks=pytest.mark.slow), "the trackers, too"])
def test_each_step_is_there_once_after_a_kill(
    who: str, database: Path, tmp_path: Path, environment: Mapping[str, str]
) -> None:
    run = tmp_path / "run"
    with sqlite3.connect(database) as connection:  # steps of the test before would answer
        if connection.execute("select 1 from sqlite_master where name = 'metrics'").fetchone():
            connection.execute("update metrics set step = step + 1000")
    kill_and_resume(run, ["wandb", "mlflow"], who, lambda: wait_for_step(database, KILLED_AT - 1))

    steps = range(1, LAST + 1)
    (metrics,) = of_mlflow(database, tmp_path.name)
    assert metrics["loss"] == [(step, pytest.approx(1 / step)) for step in steps]
    assert metrics["valid_loss"] == [(step, 2 / step) for step in steps if step % 5 == 0]
    assert metrics["summary/test_loss"] == [(LAST, 0.5)]
    file = of_wandb(run)  # one
    rows = wandb_files.history(file)
    assert [(row["_step"], row["loss"], row.get("valid_loss")) for row in rows] == [
        (step, 1 / step, None if step % 5 else 2 / step) for step in steps
    ]
    assert wandb_files.summary(file)["test_loss"] == 0.5


def of_trackio(folder: Path) -> list[tuple[str, int, dict[str, float]]]:
    """The runs, steps and values of its database, in the order in which they came."""
    (file,) = folder.glob("*.db")
    with sqlite3.connect(file) as connection:
        found = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
    return [(run, step, json.loads(values)) for run, step, values in found]


@pytest.mark.parametrize("who", ["rank 0", "the trackers, too"])
def test_trackio_has_each_step_once_after_a_kill(who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    store = tmp_path / "store"
    monkeypatch.setenv("TRACKIO_DIR", str(store))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def wait() -> None:
        while True:
            with suppress(ValueError, sqlite3.Error):  # no file or no table yet
                if of_trackio(store):
                    return
            time.sleep(0.1)

    kill_and_resume(tmp_path / "run", ["trackio"], who, wait)
    runs, steps, rows = zip(*of_trackio(store), strict=True)
    assert len(set(runs)) == 1
    assert steps == tuple(range(1, LAST + 1))
    assert [row["loss"] for row in rows] == [1 / step for step in steps]
    assert [row.get("valid_loss") for row in rows] == [None if step % 5 else 2 / step for step in steps]
    assert rows[-1]["summary/test_loss"] == 0.5


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "text.txt").write_text("the cat sat on my big red rug\n" * 60)
    return command(
        "hvd-train", "--preset", "tiny", f"data.source={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}",
        f"output_dir={folder / 'run'}", "data.workers=1", "data.tokenizer=char", "data.vocab_size=none",
        "data.sequence_length=32", "training.epochs=99", "training.log_every=1", "training.device=cpu", *words,
    )  # fmt: skip


def test_a_run_and_its_extension_are_one_run(
    tmp_path: Path, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_END_SECONDS", 250.0)
    for steps in (10, 20):
        done = train(tmp_path, f"training.max_steps={steps}", "tracking=[wandb]", "tracking_project=mine")
        assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    rows: dict[int, dict[str, float]] = {}
    for row in read_rows(run):
        rows.setdefault(row["step"], {}).update(row)
    assert list(rows) == list(range(1, 21))
    file = of_wandb(run)
    found = wandb_files.history(file)
    assert [{name: row[name] for name in rows[row["_step"]] if name != "step"} for row in found] == [
        {name: value for name, value in row.items() if name != "step"} for row in rows.values()
    ]
    summary = json.loads((run / "summary.json").read_text())
    assert wandb_files.summary(file)["test_loss"] == summary["test_loss"]
    assert wandb_files.config(file)["optimizer.lr"] == 5e-3
    assert {record.run.project for record in wandb_files.records(file) if record.HasField("run")} == {"mine"}


class Flaky:
    """A tracker that takes its rows one by one, and whose calls fail where `fails` says."""

    def __init__(self, fails: Iterator[bool]) -> None:
        self.fails, self.rows, self.closed = fails, [], ""

    def check(self) -> None: ...

    def open(self, job: Job) -> int:
        self._may_fail()
        return self.rows[-1][0] if self.rows else -1

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._may_fail()
            self.rows.append(row)

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        self._may_fail()
        self.closed = status

    def _may_fail(self) -> None:
        if next(self.fails):
            raise ConnectionError("away")


def test_a_server_that_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_process, "_LOOK_SECONDS", 1e-6)
    log = MetricsLog(tmp_path, 0, pytest.fail)
    told: list[str] = []
    tracker = Flaky(iter([True, True, False, False, False, True, *[False] * 6, True, *[False] * 99]))
    process = TrackerProcess(tracker, Job("a", "run", None, str(tmp_path), {}), told.append)
    for step in range(1, 8):
        log.write(step, loss=float(step))
        process.send()
    process.end("finished", {})
    assert tracker.rows == [(step, {"loss": float(step)}) for step in range(1, 8)]
    assert tracker.closed == "finished"
    assert told == ["away; training continues, and the steps are sent later", "logs again"] * 3


def test_an_offline_run_is_whole_after_metrics_could_not_be_read(
    tmp_path: Path, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's run is then opened again, which begins with a folder of its own."""
    import wandb

    monkeypatch.setattr(tracker_process, "_LOOK_SECONDS", 1e-6)
    log, told = MetricsLog(tmp_path, 0, pytest.fail), list[str]()
    process = TrackerProcess(WandbTracker(), Job("abc123", "run", None, str(tmp_path), {}), told.append)
    take, failures = Rows.take, iter([False, False, True])

    def flaky(rows: Rows, **last: bool) -> list[Row]:
        if next(failures, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return take(rows, **last)

    monkeypatch.setattr(Rows, "take", flaky)
    for step in range(1, 6):
        log.write(step, loss=1 / step)
        process.send()
    process.end("finished", {})
    wandb.teardown()  # its files are whole
    assert len(told) == 2 and "logs again" in told
    assert [row["_step"] for row in wandb_files.history(of_wandb(tmp_path))] == [1, 2, 3, 4, 5]


def test_a_step_is_sent_when_it_is_whole(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, pytest.fail)
    rows = Rows(tmp_path / "metrics.jsonl", 1)
    for step in (1, 2, 3):
        log.write(step, loss=float(step))
    assert rows.take() == [(2, {"loss": 2.0})]
    log.write(3, valid_loss=float("nan"), valid_f1=0.5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')
    assert rows.take() == []
    assert rows.take(last=True) == [(3, {"loss": 3.0, "valid_f1": 0.5})]


def test_what_a_tracker_has_already_is_passed_however_much_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_process, "_MOST_BYTES", 200)  # less than the lines of ten steps
    log = MetricsLog(tmp_path, 0, pytest.fail)
    for step in range(1, 101):
        log.write(step, loss=float(step))
    rows, found = Rows(tmp_path / "metrics.jsonl", 95), []
    while part := rows.take():
        found += part
    assert [step for step, _ in found + rows.take(last=True)] == [96, 97, 98, 99, 100]


def test_the_row_that_a_stop_kept_back_is_sent_by_the_next_start(
    database: Path, tmp_path: Path, environment: Mapping[str, str]
) -> None:
    """Of MLflow: the summary of the stop has a later step than the rows."""
    log = MetricsLog(tmp_path, 0, pytest.fail)
    job = Job("stopped", "run", None, str(tmp_path), {})
    for last, status in ((153, "stopped"), (170, "finished")):
        for step in range(10, last, 10):
            if step > 150 or status == "stopped":
                log.write(step, loss=float(step))
        process = TrackerProcess(MlflowTracker(), job, pytest.fail)
        process.send()
        process.end(status, {"steps": last, "train_loss": 1.0})
    (metrics,) = of_mlflow(database, tmp_path.name)
    assert [step for step, _ in metrics["loss"]] == list(range(10, 170, 10))


def test_mlflow_has_metrics_whose_names_it_refuses(
    database: Path, tmp_path: Path, environment: Mapping[str, str]
) -> None:
    tracker, job = MlflowTracker(), Job("names", "run", None, str(tmp_path), {})
    rows = [(step, {"loss": 5.0 - step, "valid_recall@10": step / 10}) for step in (1, 2, 3)]
    for number in (2, 3):  # the last row after a resume, which has the others already
        tracker.open(job)
        tracker.log(rows[:number])
    tracker.close("finished", {"steps": 3, "a,b": "text", "f1+": 0.5})
    (metrics,) = of_mlflow(database, tmp_path.name)
    assert metrics["valid_recall_10"] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert len(metrics["loss"]) == 3 and metrics["summary/f1_"] == [(3, 0.5)]


def test_passwords_in_addresses_are_not_told() -> None:
    told = without_passwords("API request to http://bob:SECRET@127.0.0.1:9/x and http://host/a@b failed")
    assert told == "API request to http://…@127.0.0.1:9/x and http://host/a@b failed"


def test_a_server_that_never_answers_does_not_keep_the_job(
    tmp_path: Path, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_END_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        trackers = Trackers(["mlflow"])
        trackers.check()
        (tmp_path / "logs").mkdir()
        MetricsLog(tmp_path, 0, pytest.fail).write(1, loss=1.0)
        trackers.follow(tmp_path, load(), 0)
        assert trackers.news() == []
        told: list[str] = []
        trackers.end("finished", {}, told.append)
        assert told == ["mlflow: not everything was sent; the same command sends the rest"]


def test_a_tracker_that_hangs_takes_no_time_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own process, which here begins with an order to end."""
    says = {
        "wandb": "import time; time.sleep(100)",
        "mlflow": "print('told mlflow: logs again'); print('done', flush=True)",
        "trackio": "pass",
    }

    def start(name: str) -> "subprocess.Popen[bytes]":
        code = f"import sys; sys.stdin.readline(); {says[name]}"
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(processes, "find_spec", lambda name: True)
    monkeypatch.setattr(processes, "_END_SECONDS", 3.0)
    told: list[str] = []
    Trackers(list(says)).end("finished", {}, told.append)
    unsent = [f"{name}: not everything was sent; the same command sends the rest" for name in ("trackio", "wandb")]
    assert told == ["mlflow: logs again", *unsent]


@pytest.mark.slow
def test_a_server_that_is_away_is_told_once(
    tmp_path: Path, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens
    trackers = Trackers(["mlflow"])
    trackers.check()
    (tmp_path / "logs").mkdir()
    log = MetricsLog(tmp_path, 0, pytest.fail)
    trackers.follow(tmp_path, load(), 0)
    news: list[str] = []
    while not news:
        news = trackers.news()
        time.sleep(0.1)
    assert len(news) == 1
    assert news[0].startswith("mlflow: ") and news[0].endswith("; training continues, and the steps are sent later")
    log.close()
    trackers.close()


def test_the_run_is_another_one_from_step_0_with_other_settings(tmp_path: Path) -> None:
    settings = flatten(load())
    first = run_id(tmp_path, settings, 0)
    assert run_id(tmp_path, settings | {"checkpoint.resume": "auto", "output_dir": "elsewhere"}, 0) == first
    assert run_id(tmp_path, settings | {"optimizer.lr": 1.0}, 20) == first
    other = run_id(tmp_path, settings | {"optimizer.lr": 1.0}, 0)
    assert other != first
    assert run_id(tmp_path, settings | {"optimizer.lr": 1.0}, 0) == other


@pytest.mark.parametrize(
    ("word", "hidden", "variables", "line"),
    [
        ("tracking=[wandb]", "", {"WANDB_MODE": "online"}, "tracking=wandb: no usable API key"),
        ("tracking=[trackio]", "trackio", {}, "tracking=trackio: needs trackio; install it with: pip install"),
        ("tracking=[mlflow]", "", {"MLFLOW_TRACKING_URI": "mlruns"}, "tracking=mlflow: MLFLOW_TRACKING_URI="),
        ("tracking=[mlflow, neptune]", "", {}, "must be a list of wandb, mlflow and trackio, such as [wandb, mlflow]"),
        ("tracking=wandb", "", {}, "must be a list of wandb, mlflow and trackio, such as [wandb, mlflow]"),
        ("tracking=[mlflow, mlflow]", "", {}, "tracking=[mlflow, mlflow]: name each tracker once"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_before_training(
    word: str, hidden: str, variables: Mapping[str, str], line: str, environment: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on my big red rug\n" * 60)
    done = command(
        "hvd-train", "--preset", "tiny", f"data.source={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}",
        f"output_dir={tmp_path / 'run'}", "data.workers=1", "data.tokenizer=char", "data.vocab_size=none", word,
        environment=variables, hide=[hidden] if hidden else [],
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and line in done.stderr
    assert not (tmp_path / "run").exists()


def test_names_of_packages_are_those_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    for name in tracker_process.TRACKERS:
        with pytest.raises(UserError, match=rf"tracking={name}: needs {name}; .*hvd-transformer\[{name}\]"):
            Trackers([name])

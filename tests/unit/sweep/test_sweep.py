"""Which trials a sweep has, which of them go on, and that it goes on where it was interrupted."""

import csv
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from commands import command

from hvd_transformer import folder_lock
from hvd_transformer.cli import sweep_runners
from hvd_transformer.cli.sweep import sweep
from hvd_transformer.cli.sweep_runners import Launched, Queued
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.service.remote.client import Busy, Client, Refused
from hvd_transformer.sweep.definition import Sweep, read_sweep
from hvd_transformer.sweep.results import table, write_results
from hvd_transformer.sweep.run import Task, TrialStopped, run_sweep
from hvd_transformer.sweep.sampling import all_values, suggested
from hvd_transformer.sweep.trials import Trial, Trials, alone_in

HALVING = {
    "preset": "tiny",
    "settings": {"optimizer.schedule": "constant", "training.device": "cpu"},
    "parameters": {"seed": list(range(1, 10))},
    "halving": {"steps": [10, 20, 60], "factor": 3},
}


def final_loss(seed: int, steps: int) -> float:
    """The made-up loss of a trial: it falls with the steps, and who leads at first is not best in the end."""
    return 3 * (seed * 5 % 7) / steps + seed / 10


class FakeTraining:
    """Trains by writing summary.json. Diverges for the seeds in `diverges`; the user interrupts after `lasts`."""

    def __init__(self, diverges: Sequence[int] = (), lasts: int = 1000) -> None:
        self.diverges, self.lasts, self.trained = diverges, lasts, []

    def run(self, tasks: Sequence[Task], begun: Callable[[], None]) -> Iterator[tuple[Task, int]]:
        for task in tasks:
            if len(self.trained) == self.lasts:
                raise KeyboardInterrupt
            given = dict(word.split("=") for word in task.words if "=" in word)
            seed, steps = int(given["seed"]), int(given.get("training.max_steps", 60))
            assert task.words[:2] == ["--preset", "tiny"]
            assert given["output_dir"] == str(task.run)
            self.trained.append((seed, steps))
            task.run.mkdir(parents=True, exist_ok=True)
            summary = {"status": "finished", "steps": steps, "seconds": 1.5, "valid_loss": final_loss(seed, steps)}
            (task.run / "summary.json").write_text(json.dumps(summary))
            yield task, int(seed in self.diverges)


def no_news(trial: Trial, max_steps: int | None) -> None: ...


def expected(diverges: Sequence[int] = ()) -> list[tuple[int, int]]:
    """What successive halving trains, by its definition."""
    alive, trained = list(range(1, 10)), []
    for steps, keep in ((10, 3), (20, 1), (60, 1)):
        trained += [(seed, steps) for seed in alive]
        alive = sorted((seed for seed in alive if seed not in diverges), key=lambda seed: final_loss(seed, steps))
        alive = alive[:keep]
    return trained


@pytest.mark.parametrize("diverges", [(), (7, 3)])
def test_successive_halving(diverges: Sequence[int], tmp_path: Path) -> None:
    training = FakeTraining(diverges)
    trials = Trials(Sweep(**HALVING), tmp_path)
    run_sweep(trials, training, no_news)
    assert sorted(training.trained) == sorted(expected(diverges))
    assert len(training.trained) == 9 + 3 + 1
    columns, rows = table(trials)
    assert columns == ["trial", "seed", "steps", "valid_loss", "state", "seconds"]
    states = [row[4] for row in rows]
    assert states == ["finished", *["stopped early"] * (8 - len(diverges)), *["failed"] * len(diverges)]
    best = expected(diverges)[-1][0]
    assert rows[0][1:4] == [str(best), "60", final_loss(best, 60)]


@pytest.mark.parametrize("lasts", [0, 4, 9, 11])
def test_an_interrupted_sweep_goes_on(lasts: int, tmp_path: Path) -> None:
    first, second = FakeTraining(lasts=lasts), FakeTraining()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(Trials(Sweep(**HALVING), tmp_path), first, no_news)
    run_sweep(Trials(Sweep(**HALVING), tmp_path), second, no_news)
    assert len(first.trained) == lasts
    assert sorted(first.trained + second.trained) == sorted(expected())
    third = FakeTraining()
    run_sweep(Trials(Sweep(**HALVING), tmp_path), third, no_news)
    assert third.trained == []


def test_a_trial_that_fails_later_is_not_replaced(tmp_path: Path) -> None:
    """The same command trains nothing more: who was not among the best stays out."""

    class FailsAtTwenty(FakeTraining):
        def run(self, tasks: Sequence[Task], begun: Callable[[], None]) -> Iterator[tuple[Task, int]]:
            for task, code in super().run(tasks, begun):
                yield task, int(code or "training.max_steps=20" in task.words)

    run_sweep(Trials(Sweep(**HALVING), tmp_path), FailsAtTwenty(), no_news)
    again = FakeTraining()
    run_sweep(Trials(Sweep(**HALVING), tmp_path), again, no_news)
    assert again.trained == []


class FailsWith(FakeTraining):
    """The trials of these seeds end with this exit code."""

    def __init__(self, code: int, *seeds: int) -> None:
        super().__init__(seeds)
        self._code = code

    def run(self, tasks: Sequence[Task], begun: Callable[[], None]) -> Iterator[tuple[Task, int]]:
        for task, code in super().run(tasks, begun):
            yield task, self._code if code else 0


def test_values_that_do_not_fit_into_memory_fail_and_the_others_go_on(tmp_path: Path) -> None:
    """hvd-train exits with 2 where memory ends before the first step."""
    training = FailsWith(2, 1, 3, 7)
    trials = Trials(Sweep(**HALVING), tmp_path)
    run_sweep(trials, training, no_news)
    assert sorted(training.trained) == sorted(expected((1, 3, 7)))
    assert [trial.number for trial in trials.all if trial.failed] == [1, 3, 7]


def test_a_sweep_of_which_no_trial_can_be_trained_is_wrong_input_and_goes_on_when_that_is_mended(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"trial-001: cannot be trained: .*; its error is above$"):
        run_sweep(Trials(Sweep(**HALVING), tmp_path), FailsWith(2, *range(1, 10)), no_news)
    second = FakeTraining()
    run_sweep(Trials(Sweep(**HALVING), tmp_path), second, no_news)
    assert sorted(second.trained) == sorted(expected())


@pytest.mark.parametrize("text", ["/data/a\u3000b.txt", "/data/a\u00a0b.txt", "a b", "'quoted'"])
def test_texts_reach_the_trials_as_they_are(text: str) -> None:
    words = Sweep(**{**HALVING, "settings": {"data.source": text}}).settings_of({"seed": 1})
    assert load(overrides=words).data.source == text


def test_halving_trains_its_steps_whatever_the_epochs_of_the_preset(tmp_path: Path) -> None:
    """An epoch has a step at least, so that many epochs are enough; those of the sweep's own settings are a limit."""
    chosen = Sweep(**HALVING)
    assert {"training.epochs=60", "training.max_steps=10"} <= set(chosen.settings_of({"seed": 1}, 10))
    limited = Sweep(**{**HALVING, "settings": {"training.epochs": 3}})
    assert "training.epochs=3" in limited.settings_of({"seed": 1}, 10)
    assert not any("epochs" in word for word in chosen.settings_of({"seed": 1}))


def test_the_steps_that_are_shown_are_those_of_the_run(tmp_path: Path) -> None:
    """It may end before its rung does, as by training.patience."""

    class EndsEarly(FakeTraining):
        def run(self, tasks: Sequence[Task], begun: Callable[[], None]) -> Iterator[tuple[Task, int]]:
            for task, code in super().run(tasks, begun):
                file = task.run / "summary.json"
                file.write_text(json.dumps({**json.loads(file.read_text()), "steps": 7}))
                yield task, code

    trials = Trials(Sweep(**HALVING), tmp_path)
    run_sweep(trials, EndsEarly(), no_news)
    columns, rows = table(trials)
    assert {row[columns.index("steps")] for row in rows} == {"7"}


OPTUNA = {**HALVING, "halving": None, "method": "optuna", "trials": 6, "parameters": {"seed": {"min": 1, "max": 9}}}


def test_optuna_goes_on_after_a_trial_that_does_not_fit(tmp_path: Path) -> None:
    """Also if it is the first: another one may."""
    pytest.importorskip("optuna")
    whole = FakeTraining()
    run_sweep(Trials(Sweep(**OPTUNA), tmp_path / "whole"), whole, no_news)
    first = whole.trained[0][0]
    trials = Trials(Sweep(**OPTUNA), tmp_path / "one")
    run_sweep(trials, FailsWith(2, first), no_news)
    assert [trial.failed for trial in trials.all][:1] == [True]
    assert len(trials.all) == 6 and any(trial.value is not None for trial in trials.all)


def test_optuna_ends_where_no_trial_can_be_trained(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    trials, training = Trials(Sweep(**OPTUNA), tmp_path), FailsWith(2, *range(1, 10))
    with pytest.raises(UserError, match=r"trial-003: cannot be trained: .*; its error is above; --retry-failed trains"):
        run_sweep(trials, training, no_news)
    assert len(training.trained) == 3
    with pytest.raises(UserError, match=r"trial-006: cannot be trained"):  # the same command goes on
        run_sweep(Trials(Sweep(**OPTUNA), tmp_path), training, no_news)


def test_failed_trials_are_trained_again_when_asked(tmp_path: Path) -> None:
    run_sweep(Trials(Sweep(**HALVING), tmp_path), FailsWith(137, 3, 7), no_news)
    trials, again = Trials(Sweep(**HALVING), tmp_path), FakeTraining()
    trials.forget_failures()
    run_sweep(trials, again, no_news)
    assert [seed for seed, steps in again.trained if steps == 10] == [3, 7]
    assert not any(trial.failed for trial in trials.all)


@pytest.mark.parametrize("code", [-15, 75, 1])
def test_a_trial_that_was_ended_from_outside_is_trained_again(code: int, tmp_path: Path) -> None:
    """By a signal, by the watchdog, or as a run that was stopped."""

    class Ended(FakeTraining):
        def run(self, tasks: Sequence[Task], begun: Callable[[], None]) -> Iterator[tuple[Task, int]]:
            for task, _ in super().run(tasks, begun):
                if code == 1:
                    (task.run / "summary.json").write_text(json.dumps({"status": "stopped"}))
                task.trial.job = 7
                yield task, code

    with pytest.raises(TrialStopped, match="trial-001 was stopped") as stopped:
        run_sweep(Trials(Sweep(**HALVING), tmp_path), Ended(), no_news)
    assert stopped.value.code == (75 if code == 75 else 1)
    trials, second = Trials(Sweep(**HALVING), tmp_path), FakeTraining()
    assert trials.all[0].job is None
    run_sweep(trials, second, no_news)
    assert sorted(second.trained) == sorted(expected())


def test_another_sweep_does_not_take_the_folder(tmp_path: Path) -> None:
    Trials(Sweep(**HALVING), tmp_path).save()
    with pytest.raises(UserError, match="holds a sweep with another halving; choose another output_dir"):
        Trials(Sweep(**{**HALVING, "halving": {"steps": [10, 30]}}), tmp_path)
    Trials(Sweep(**{**HALVING, "ranks": 2}), tmp_path)


def test_two_sweeps_do_not_start_the_same_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "END_SECONDS", 0.1)
    (tmp_path / "sweep.yaml").write_text(PARAMETERS + f"output_dir: {tmp_path / 'all'}\n")
    with (
        alone_in(tmp_path / "all", pytest.fail),
        pytest.raises(UserError, match=r"all: in use by hvd-transformer sweep on host .*choose another folder$"),
    ):
        sweep.main([str(tmp_path / "sweep.yaml"), "--local"], standalone_mode=False)
    assert list((tmp_path / "all").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: cannot be written: File exists$"), alone_in(tmp_path / "file", print):
        pass


def test_a_text_with_a_comma_stays_one(tmp_path: Path) -> None:
    """In a list or a table of the command line."""
    (tmp_path / "sweep.yaml").write_text("parameters:\n  data.sources: [[{source: 'a, b: c.jsonl', weight: 1}]]\n")
    chosen = read_sweep(tmp_path / "sweep.yaml")
    (values,) = all_values(chosen)
    config = load(overrides=["data.text_column=text", *chosen.words(values)])
    assert config.data.sources == [{"source": "a, b: c.jsonl", "weight": 1}]


def test_a_date_is_text(tmp_path: Path) -> None:
    """YAML reads it as something that JSON lacks."""
    file = tmp_path / "sweep.yaml"
    file.write_text("preset: tiny\nparameters: {data.source: [2026-11-25, b]}\n")
    chosen = read_sweep(file)
    trials = Trials(chosen, tmp_path / "all")
    trials.trial(1, all_values(chosen)[0])
    trials.save()
    (again,) = Trials(chosen, tmp_path / "all").all
    assert again.values == {"data.source": "2026-11-25"}


class FakeService:
    """Its jobs, by number: their run directories. Each succeeds at once."""

    def __init__(self, jobs: dict[int, Path]) -> None:
        self.jobs, self.submitted, self.states = jobs, [], dict[int, str]()

    def get(self, page: str) -> dict[str, Any]:
        number = int(page.removeprefix("jobs/"))
        if number not in self.jobs:
            raise Refused(404, f"no job {number}")
        return {"id": number, "output_dir": str(self.jobs[number]), "state": "SUCCEEDED", "attempts": []}

    def items(self, page: str, **query: Any) -> Iterator[dict[str, Any]]:
        assert page == "jobs" and query["tag"].startswith("sweep=")
        yield from (
            {**self.get(f"jobs/{number}"), "state": self.states.get(number, "SUCCEEDED")} for number in self.jobs
        )

    def submit(self, request: dict[str, Any]) -> dict[str, Any]:
        number = 100 + len(self.submitted)
        self.submitted.append(request["name"])
        self.jobs[number] = Path(request["words"][-1].removeprefix("output_dir="))
        return {"ids": [number]}

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "open", {}


@pytest.mark.parametrize("there", ["own", "another's", "none"])
def test_a_job_of_another_service_is_not_waited_for(there: str, tmp_path: Path) -> None:
    trial = Trial(1, {"seed": 1}, job=7)
    task = Task(trial, ["seed=1", f"output_dir={tmp_path / trial.name}"], tmp_path / trial.name)
    jobs = {"own": {7: task.run}, "another's": {7: tmp_path / "other"}, "none": {}}[there]
    service = FakeService(jobs)
    runner = Queued(cast(Client, service), 1, [])
    assert list(runner.run([task], lambda: None)) == [(task, 0)]
    assert service.submitted == ([] if there == "own" else ["trial-001"])


@pytest.mark.parametrize("state", ["RUNNING", "FAILED"])
def test_a_job_whose_submission_was_interrupted_is_taken_over(state: str, tmp_path: Path) -> None:
    trial = Trial(1, {"seed": 1})
    task = Task(trial, ["seed=1", f"output_dir={tmp_path / trial.name}"], tmp_path / trial.name)
    service = FakeService({7: task.run.resolve(), 8: tmp_path / "other"})
    service.states = {7: state, 8: "RUNNING"}
    assert list(Queued(cast(Client, service), 1, []).run([task], lambda: None)) == [(task, 0)]
    assert (trial.job, service.submitted) == ((7, []) if state == "RUNNING" else (100, ["trial-001"]))


def test_trials_that_the_service_does_not_take_yet_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user may have two jobs in the queue; each of them begins with the next look, and the last one ends."""
    monkeypatch.setattr(sweep_runners, "POLL_SECONDS", 0.01)
    tasks = [
        Task(Trial(number, {}), [f"output_dir={tmp_path}/{number}"], tmp_path / f"{number}") for number in range(1, 6)
    ]

    class OfTwo(FakeService):
        refusals = 0

        def submit(self, request: dict[str, Any]) -> dict[str, Any]:
            if len(self.submitted) == 2 * (self.refusals + 1):
                self.refusals += 1
                if self.refusals == 2:
                    raise Busy(503, "the service has too much to do")
                raise Refused(429, "ana has 2 jobs in the queue and may have 2; 1 more are too many")
            return super().submit(request)

    service = OfTwo({})
    found = list(Queued(cast(Client, service), 1, []).run(tasks, lambda: None))
    assert sorted(task.trial.number for task, code in found if code == 0) == [1, 2, 3, 4, 5]
    assert service.submitted == [task.trial.name for task in tasks] and service.refusals == 2
    refusal = "ana has 2 jobs in the queue and may have 2; 1 more are too many"
    assert capsys.readouterr().err == f"hvd-transformer: {refusal}; trial-003 waits\n"


def test_a_sweep_that_waits_for_room_asks_ever_more_seldom_until_a_trial_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt makes the service check a configuration. The queue is full for an hour; then one trial ends."""
    now, attempts = 0.0, list[float]()

    class Clock:
        def monotonic(self) -> float:
            return now

        def sleep(self, seconds: float) -> None:
            nonlocal now
            now += seconds

    class Full(FakeService):
        def get(self, page: str) -> dict[str, Any]:
            return {**super().get(page), "state": "SUCCEEDED" if now > 3600 else "RUNNING"}

        def submit(self, request: dict[str, Any]) -> dict[str, Any]:
            if self.submitted:
                attempts.append(now)
                if now <= 3600:
                    raise Refused(429, "the queue is full")
            return super().submit(request)

    monkeypatch.setattr(sweep_runners, "time", Clock())
    tasks = [Task(Trial(number, {}), [f"output_dir={tmp_path}/{number}"], tmp_path / f"{number}") for number in (1, 2)]
    assert len(list(Queued(cast(Client, Full({})), 1, []).run(tasks, lambda: None))) == 2
    assert attempts[:5] == [0, 5, 15, 35, 75] and len(attempts) < 55
    assert attempts[-1] == 3605  # with the next look after the end


def test_another_refusal_ends_the_sweep(tmp_path: Path) -> None:
    class Refuses(FakeService):
        def submit(self, request: dict[str, Any]) -> dict[str, Any]:
            if self.submitted:
                raise Refused(422, "output_dir: job 1 uses it")
            return super().submit(request)

    tasks = [Task(Trial(number, {}), [f"output_dir={tmp_path}/{number}"], tmp_path / f"{number}") for number in (1, 2)]
    with pytest.raises(Refused, match="job 1 uses it"):
        list(Queued(cast(Client, Refuses({})), 1, []).run(tasks, lambda: None))


@pytest.mark.parametrize(("code", "key"), [(2, "refused"), (1, "lost"), (3, "lost")])
def test_a_launcher_that_cannot_use_hosts_ends_the_sweep_and_fails_no_trial(
    code: int, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = json.dumps({"refused": {}, "lost": {}})
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho "$HOW" > "$HVD_TRANSFORMER_EXIT_FILE"\nexit {code}\n')
    launcher.chmod(0o755)
    runner = Launched(1, [], None)
    runner._words = [str(launcher)]
    task = Task(Trial(1, {}), [], tmp_path / "trial-001")
    monkeypatch.setenv("HOW", how)
    assert list(runner.run([task], lambda: None)) == [(task, code)]  # the trial's own
    monkeypatch.setenv("HOW", json.dumps({**json.loads(how), key: {"h2": "away"}}))
    with pytest.raises(UserError, match="trial-001: hosts that cannot be used: h2; run the same command to resume"):
        list(runner.run([task], lambda: None))


def test_a_launcher_that_an_earlier_sweep_has_left_is_waited_for(tmp_path: Path, capsys: Any) -> None:
    task = Task(Trial(1, {}), [], tmp_path / "trial-001")
    task.run.mkdir()
    left = folder_lock.FolderLock(task.run / ".launcher", "a launcher")
    left.take()
    threading.Timer(1, left.release).start()
    runner, began = Launched(1, [], None), time.monotonic()
    runner._words = ["true"]
    assert list(runner.run([task], lambda: None)) == [(task, 0)]
    assert time.monotonic() - began > 0.9
    assert "waiting for its end" in capsys.readouterr().err


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "results.csv").mkdir()
    with pytest.raises(UserError, match=r"results.csv: cannot be written: Is a directory$"):
        write_results(Trials(Sweep(**HALVING), tmp_path))


def test_results_are_written(tmp_path: Path) -> None:
    parameters = {"seed": [1, 2], "optimizer.lr": ["1e-4", "1e-2"], "model.activation": ["gelu", "relu"]}
    trials = Trials(Sweep(preset="tiny", parameters=parameters), tmp_path)
    run_sweep(trials, FakeTraining(), no_news)
    write_results(trials)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert [float(row["valid_loss"]) for row in rows] == pytest.approx(
        [final_loss(1, 60)] * 4 + [final_loss(2, 60)] * 4
    )
    assert {(row["seed"], row["optimizer.lr"], row["model.activation"]) for row in rows} == {
        (seed, rate, name) for seed in "12" for rate in ("1e-4", "1e-2") for name in ("gelu", "relu")
    }
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_random_values_are_in_their_ranges_and_more_trials_leave_them_as_they_are() -> None:
    parameters = {
        "optimizer.lr": {"min": "1e-4", "max": "1e-2", "scale": "log"},
        "model.dropout": {"min": 0.0, "max": 0.5},
        "model.num_layers": {"min": 1, "max": 4},
        "training.batch_size": {"min": 1, "max": 64, "scale": "log"},
        "model.norm": ["pre", "post"],
    }
    few, many = (all_values(Sweep(parameters=parameters, method="random", trials=n)) for n in (50, 1000))
    assert many[:50] == few
    rates = sorted(math.log10(values["optimizer.lr"]) for values in many)
    assert rates[0] >= -4 and rates[-1] <= -2
    for part in (1, 2, 3):  # uniform in the logarithm: its quartiles
        assert rates[250 * part] == pytest.approx(-4 + part / 2, abs=0.1)
    dropouts = sorted(values["model.dropout"] for values in many)
    assert dropouts[0] >= 0 and dropouts[-1] <= 0.5 and dropouts[500] == pytest.approx(0.25, abs=0.03)
    assert {values["model.num_layers"] for values in many} == {1, 2, 3, 4}
    sizes = [values["training.batch_size"] for values in many]
    assert {1, 64} <= set(sizes) <= set(range(1, 65))
    assert sum(size < 8 for size in sizes) == pytest.approx(557, abs=50)  # log(7.5 / 0.5) / log(64.5 / 0.5) = 0.56
    assert {values["model.norm"] for values in many} == {"pre", "post"}


def test_optuna_takes_any_seed() -> None:
    chosen = Sweep(parameters={"optimizer.lr": {"min": 0.1, "max": 1.0}}, method="optuna", seed=20_240_607_123)
    assert suggested(chosen, []) == suggested(chosen, [])


def test_metrics_of_a_task_of_ones_own_have_any_name() -> None:
    assert Sweep(parameters={"seed": [1]}, metric="valid_recall@10").metric == "valid_recall@10"
    with pytest.raises(ValueError, match="metric"):
        Sweep(parameters={"seed": [1]}, metric="test_loss")


def test_optuna_learns_from_the_trials_before() -> None:
    parameters = {"optimizer.lr": {"min": 1e-5, "max": 1.0, "scale": "log"}, "model.norm": ["pre", "post"]}
    chosen = Sweep(parameters=parameters, method="optuna", trials=40, metric="valid_f1")

    def score(values: dict[str, Any]) -> float | None:
        if values["optimizer.lr"] > 0.3:
            return None  # diverged
        return -abs(math.log10(values["optimizer.lr"]) + 2) - (values["model.norm"] == "post")

    done: list[tuple[dict[str, Any], float | None]] = []
    for _ in range(40):
        values = suggested(chosen, done)
        assert values == suggested(chosen, done)  # what an interrupted sweep would try
        done.append((values, score(values)))
    last = [values for values, _ in done[-10:]]
    assert sum(values["model.norm"] == "pre" for values in last) >= 8
    assert sum(-3 < math.log10(values["optimizer.lr"]) < -1 for values in last) >= 8


PARAMETERS = "parameters: {optimizer.lr: [1e-3, 1e-2]}\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "must contain keys and values; its keys are preset, config, settings, parameters, method"),
        ("parameters: [", "line 1: not valid YAML"),
        (PARAMETERS + PARAMETERS, "line 2: not valid YAML: parameters is set twice"),
        (PARAMETERS + "settings: {a: 1, a: 2}\n", "line 2: not valid YAML: a is set twice"),
        (PARAMETERS + "settings: &a {seed: *a}\n", "not valid YAML: lists or tables nested more than 20 deep"),
        ("parameters: {}\n", "parameters: {}: must be keys, each with a list of values, or a range such as {min:"),
        ("trials: 3\n", "parameters: missing; must be keys, each with"),
        (PARAMETERS + "metrik: valid_loss\n", "metrik: unknown key; the keys are preset, config"),
        (PARAMETERS + "metric: test_loss\n", "metric: test_loss: must be train_loss, or a metric of"),
        (PARAMETERS + "direction: up\n", "direction: up: must be minimize or maximize"),
        (PARAMETERS + "ranks: 0\n", "ranks: 0: must be a number from 1 on"),
        (PARAMETERS + "trials: 3\n", "trials: not with method=grid, which tries all combinations"),
        (PARAMETERS + "method: random\n", "trials: missing; must be a number from 1 to 1000"),
        (PARAMETERS + "method: best\n", "method: best: must be grid, random or optuna"),
        (PARAMETERS + "halving: {steps: [30, 10]}\n", "halving: [30, 10]: must be steps and factor, such as"),
        (PARAMETERS + "halving: {steps: [10]}\n", "halving: {steps: [10]}: must be steps and factor, such as"),
        (PARAMETERS + "halving: {steps: [10, 30]}\n", "halving: not with optimizer.schedule=cosine, whose"),
        (PARAMETERS + "preset: tiny\nsettings: {optimizer.lr: 1}\n", "optimizer.lr: is in settings, too"),
        (PARAMETERS + "preset: huge\n", "--preset huge: no such preset"),
        (PARAMETERS + "settings: {training.batch_size: 0}\n", "training.batch_size=0"),
        ("parameters: {optimizer.rate: [1]}\n", "parameters: optimizer.rate: no key of hvd-train"),
        ("parameters: {optimizer.lr: 3}\n", "parameters: optimizer.lr: 3: must be a list of values, or a range"),
        ("parameters: {optimizer.lr: [-1]}\n", "sweep.yaml): must be greater than 0"),
        (PARAMETERS + "settings: {optimizer.rate: 1}\n", "sweep.yaml): unknown key"),
        (
            "parameters: {model.num_layers: {min: 1, max: 5.0}}\nmethod: optuna\ntrials: 2\n",  # 2.5 layers
            "sweep.yaml): must be a valid integer",
        ),
        (
            "parameters: {model.d_model: [40, 24], model.num_heads: [2, 4, 10]}\nsettings: {model.position: rotary}\n"
            "method: optuna\ntrials: 2\n",
            "model.d_model=24: must be a multiple of model.num_heads=10",
        ),
        (PARAMETERS + "output_dir: ~no-such-user/a\n", "sweep.yaml: output_dir: ~no-such-user/a: must be a folder"),
        (PARAMETERS + 'output_dir: "a\\0b"\n', "sweep.yaml: output_dir: 'a\\x00b': must be a folder"),
        (PARAMETERS + "config: ~no-such-user/a\n", "sweep.yaml: config: ~no-such-user/a: must be a YAML file"),
        (PARAMETERS + "config: base.yaml\n", "base.yaml: cannot be read: No such file"),
        ("parameters: {parallel.tensor: [1, 2]}\n", "ranks: 1: must be a multiple of parallel.tensor=2"),
        ("parameters: {parallel.pipeline: [1, 9]}\n", "parallel.pipeline=9"),
        (
            PARAMETERS + "ranks: 3\nsettings: {training.global_batch_size: 2, training.batch_size: 1}\n",
            "training.global_batch_size=2: is enough for 2 ranks, not for 3",
        ),
        (PARAMETERS + "launch: --nope\n", "sweep.yaml: launch: --nope: No such option '--nope'"),
        (PARAMETERS + "launch: --restarts -1\n", "launch: --restarts -1: --restarts -1: must be 0 or more"),
        (PARAMETERS + "launch: -np 2\n", "launch: -np 2: -np: not for the trials of a sweep"),
        (PARAMETERS + "launch: seed=3\n", "launch: seed=3: seed=3: not for the trials of a sweep"),
        (
            PARAMETERS + "metric: valid_los\n",
            "sweep.yaml: metric: valid_los: no metric of task=language_model; must be one of train_loss, valid_loss, "
            "valid_perplexity",
        ),
        (
            PARAMETERS + "settings: {task: translation}\nmetric: valid_accuracy\n",
            "must be one of train_loss, valid_loss, valid_perplexity, valid_bleu, valid_bleu_words, valid_chrf",
        ),
        (
            "parameters: {task: [language_model, classification]}\nmetric: valid_perplexity\n",
            "no metric of task=classification; must be one of train_loss, valid_loss, valid_accuracy, valid_precision, "
            "valid_recall, valid_f1, valid_precision_macro, valid_recall_macro, valid_f1_macro",
        ),
        ("parameters: {training.best_metric: [loss, -bleu]}\n", "training.best_metric=-bleu: no metric of task=lang"),
        (PARAMETERS + "settings: {task: 'no_such_module:Class'}\n", "cannot be imported: ModuleNotFoundError"),
        ("parameters: {optimizer.lr: {min: 1, max: 2}}\n", "optimizer.lr: a range, of which method=grid has no values"),
        ("parameters: {seed: {min: 2, max: 1}}\nmethod: random\ntrials: 2\n", "min must be below max"),
        ("parameters: {seed: {min: 0, max: 9, scale: log}}\nmethod: random\ntrials: 2\n", "with scale=log above 0"),
        ("parameters: {output_dir: [a, b]}\n", "parameters: output_dir: the sweep sets it"),
        (PARAMETERS + "settings: {checkpoint.resume: never}\n", "settings: checkpoint.resume: the sweep sets it"),
        (PARAMETERS + "launch: \"-H 'a\"\n", "launch: -H 'a: No closing quotation"),
        (f"parameters: {{seed: {list(range(40))}, data.min_frequency: {list(range(1, 41))}}}\n", "1,600 combinations"),
        ("parameters: {seed: &all [*all]}\n", "nested more than 20 deep, or in themselves"),
        (
            "parameters: {seed: [&a0 [1], " + ", ".join(f"&a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 15)) + "]}\n",
            "not valid YAML: more than 100,000 values, with those that aliases repeat",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_one_line(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:  # with which every command exits with code 2
        sweep.main([str(file), "--local"], standalone_mode=False)
    assert line in str(refused.value) and "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("key", ["checkpoint: {resume: never}", "checkpoint: {resume: runs/other}"])
def test_a_configuration_that_no_rung_could_resume_is_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(key)
    (tmp_path / "sweep.yaml").write_text(PARAMETERS + f"config: {tmp_path / 'base.yaml'}\n")
    with pytest.raises(UserError, match=r"sweep.yaml: checkpoint.resume=\S+: trials need auto"):
        sweep.main([str(tmp_path / "sweep.yaml"), "--local"], standalone_mode=False)


def test_optuna_is_optional(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(PARAMETERS + "method: optuna\ntrials: 2\n")
    done = command("hvd-transformer", "sweep", "sweep.yaml", folder=tmp_path, hide=["optuna"])
    assert done.returncode == 2
    assert "method=optuna: needs optuna; install it with: pip install 'hvd-transformer[sweep]'" in done.stderr


@pytest.mark.parametrize(
    ("metric", "direction", "sign"),
    [("valid_loss", None, 1), ("valid_perplexity", None, 1), ("valid_bleu", None, -1), ("valid_rmse", "minimize", 1)],
)
def test_the_direction_follows_from_the_metric(metric: str, direction: str | None, sign: int, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(PARAMETERS + f"metric: {metric}\n" + (f"direction: {direction}\n" if direction else ""))
    assert read_sweep(file).sign == sign

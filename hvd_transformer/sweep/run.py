"""Runs the trials of a sweep: rung by rung, or one after the other as Optuna suggests them.

A rung resumes each trial's run with a larger training.max_steps, so that no step is trained twice.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hvd_transformer.errors import STALLED, WRONG_INPUT, UserError
from hvd_transformer.sweep.definition import Sweep
from hvd_transformer.sweep.sampling import all_values, suggested
from hvd_transformer.sweep.trials import Trial, Trials

_MOST_REFUSED = 3  # trials that Optuna suggests, if none has a result


@dataclass(frozen=True)
class Task:
    """One training: a trial up to the end of one rung."""

    trial: Trial
    words: list[str]  # of hvd-train
    run: Path  # its run directory


class Runner(Protocol):
    """Runs trainings: here, or through the queue of a service."""

    def run(self, tasks: Sequence[Task], begun: Callable[[], None]) -> Iterator[tuple[Task, int]]:
        """The trainings and their exit codes, each when it has ended; below 0: it was ended from outside. `begun`: call
        when a trial has got a job."""


class TrialStopped(Exception):
    """A trial was ended from outside, which is no result. `code`: the exit code of the sweep."""

    def __init__(self, trial: Trial, code: int) -> None:
        super().__init__(f"{trial.name} was stopped (exit code {code}); run the same command to resume")
        self.code = code if code == STALLED else 1


def run_sweep(trials: Trials, runner: Runner, show: Callable[[Trial, int | None], None]) -> None:
    """Run all trials that have no result yet; `show` is called with each one that ends, and its rung.

    Raises `UserError` if no trial can be trained for wrong input, and `TrialStopped`.
    """
    sweep, refused = trials.sweep, list[Task]()
    if sweep.method == "optuna":
        for number in range(1, (sweep.trials or 0) + 1):
            before = [(trial.values, trial.value) for trial in trials.all[: number - 1]]
            known = number <= len(trials.all)
            trial = trials.trial(number, {} if known else suggested(sweep, before))
            refused += _rung(trials, [trial], None, runner, show)
            # Another trial may fit, unless it is not their values.
            if len(refused) >= min(_MOST_REFUSED, sweep.trials or 1) and not trials.any_result:
                raise _untrainable(refused[-1], "; --retry-failed trains failed trials again")
        return
    alive = [trials.trial(number, values) for number, values in enumerate(all_values(sweep), start=1)]
    for max_steps in sweep.rungs:
        _rung(trials, alive, max_steps, runner, show)
        if sweep.halving is not None and max_steps is not None:
            alive = trials.best(alive, max_steps)[: max(1, len(alive) // sweep.halving.factor)]


def _rung(
    trials: Trials,
    alive: Sequence[Trial],
    max_steps: int | None,
    runner: Runner,
    show: Callable[[Trial, int | None], None],
) -> list[Task]:
    """Returns what was refused for wrong input."""
    rung = "end" if max_steps is None else str(max_steps)
    trials.save()
    tasks = [_task(trials, trial, max_steps) for trial in alive if rung not in trial.results and not trial.failed]
    refused: list[Task] = []

    def record(task: Task, summary: Mapping[str, Any], result: float | None) -> None:
        trial = task.trial
        trial.results[rung], trial.steps, trial.seconds = result, summary.get("steps"), summary.get("seconds")
        trials.save()
        show(task.trial, max_steps)

    for task, code in runner.run(tasks, trials.save):
        summary = _summary(task.run)
        task.trial.job = None
        if code == WRONG_INPUT:  # of all trials, or values of this one that do not fit into memory or the data
            trials.save()
            refused.append(task)
            continue
        if code < 0 or code == STALLED or (code != 0 and summary.get("status") == "stopped"):
            trials.save()
            raise TrialStopped(task.trial, code)
        result = _metric(trials.sweep, summary, task.run) if code == 0 else None
        record(task, summary, result)
    if refused and trials.sweep.method != "optuna" and not trials.any_result:  # in a grid all are refused at once
        raise _untrainable(refused[0])
    for task in refused:
        record(task, {}, None)
    return refused


def _untrainable(task: Task, more: str = "") -> UserError:
    words = " ".join(task.words)
    return UserError(f"{task.trial.name}: cannot be trained: {words}; its error is above{more}")


def _task(trials: Trials, trial: Trial, max_steps: int | None) -> Task:
    run = trials.folder.absolute() / trial.name
    return Task(trial, [*trials.sweep.words(trial.values, max_steps), f"output_dir={run}"], run)


def _summary(run: Path) -> dict[str, Any]:
    try:
        summary = json.loads((run / "summary.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _metric(sweep: Sweep, summary: dict[str, Any], run: Path) -> float | None:
    """The metric of a run that has finished; None: it is no finite number."""
    if sweep.metric not in summary:
        names = [name for name in summary if name.startswith("valid_")]
        raise UserError(f"metric={sweep.metric}: not in {run / 'summary.json'}, which has {', '.join(names)}")
    value = summary[sweep.metric]
    return None if value is None else float(value)

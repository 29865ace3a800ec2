"""One run from its first step to its summary: when to log, evaluate, save and stop."""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from hvd_transformer import atomic
from hvd_transformer.checkpoint.restore import restore_weights
from hvd_transformer.checkpoint.shared_folder import with_verification
from hvd_transformer.checkpoint.writer import Saver
from hvd_transformer.data.sampler import StepPlan
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.reporting.metrics_log import MetricsLog
from hvd_transformer.reporting.progress import ProgressDisplay
from hvd_transformer.reporting.samples_log import SamplesLog
from hvd_transformer.reporting.trackers.processes import Trackers
from hvd_transformer.tasks.metrics import chosen, is_better, show_metrics
from hvd_transformer.training.process import StopRequest
from hvd_transformer.training.profiled_steps import ProfiledSteps
from hvd_transformer.training.run_directory import RunDirectory
from hvd_transformer.training.state import Wishes
from hvd_transformer.training.step_log import StepLog
from hvd_transformer.training.summary import finite, of_split, run_summary
from hvd_transformer.training.trainer import Trainer
from hvd_transformer.training.training_step import Diverged, TrainingStep

log = logging.getLogger(__name__)

_PAUSES = 1.0, 4.0  # seconds before the last checkpoint is written again
_LONG_EVALUATION = 5.0  # seconds; launchers that stop a job wait no longer, and kill it


class NotSaved(RuntimeError):
    """The last checkpoint of a run could not be written: its last weights are lost."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"step {step}: the last checkpoint could not be written, see the warnings above; the same command "
            "resumes from the previous one, if there is one"
        )


class Session:
    """Runs a `Trainer` until the job ends or is stopped; rank 0 writes the run directory."""

    def __init__(
        self,
        trainer: Trainer,
        run: RunDirectory,
        progress: ProgressDisplay,
        data_digest: str,
        heartbeat: Heartbeat,
        trackers: Trackers,
        environment: Mapping[str, Any],
        peak: float | None = None,
        *,
        saved_step: int | None = None,
    ) -> None:
        """`saved_step`: that of the run's own checkpoint that it resumes from."""
        self.config, self.world, self.trainer, self.run = trainer.config, trainer.world, trainer, run
        self.progress, self.data_digest, self.heartbeat = progress, data_digest, heartbeat
        self.environment = environment
        self.saver = Saver(run.store, self.world, self.warn)
        step, again = trainer.state.step, trainer.state.step > 0 and self._evaluation_due()
        is_first = self.world.rank == 0
        self.metrics = MetricsLog(run.path, step, self.warn, evaluates=again) if is_first else None
        self.samples = SamplesLog(run.path, step, self.warn, evaluates=again) if is_first else None
        self.trackers = trackers
        trackers.follow(run.path, self.config, trainer.state.step)
        self.step_log = StepLog(trainer, run, progress, heartbeat, self.metrics, trackers, self.warn, peak)
        self.saved_step = saved_step
        self.bests = [(trainer.state.best, trainer.state.best_step)]  # each better than the one before
        self.saved_at = time.monotonic()
        self.valid: dict[str, float] | None = None
        self.evaluation_seconds = math.inf  # of the last one, on the slowest rank
        self.status: str | None = None  # None: training goes on
        self.tested_step: int | None = None  # whose weights the metrics of a finished run are of

    def train(self, stop: StopRequest) -> str:
        """Train until the end ("finished") or until a rank was asked to stop ("stopped"). Collective."""
        state = self.trainer.state
        self.progress.start(self.trainer.total_steps, state.step)
        stopped, stop.on_first = False, partial(self._answer, stop)
        queued: list[TrainingStep] = []
        timeline, file = self.trainer.engine.timeline, self.run.path / f"timeline-{self.world.rank:03d}.json"
        profiled = ProfiledSteps(timeline, file, self.warn, wanted=self.config.profile)
        try:
            if state.step and self._evaluation_due():  # stopped or killed before it could be
                best, stopped = self._evaluate(stop)
                if best or stopped:
                    self.save(best)
            steps = takewhile(lambda _: not stopped and not self._patience_ended(), self.trainer.steps())
            for number, plan in enumerate(steps, start=1):
                profiled.begin(number)
                self.heartbeat.phase = "step"
                compares, costs = self.step_log.ask(state.step + 1, queued)
                wishes = Wishes(bool(stop), self._save_due_by_time(), compares)
                self.heartbeat.ahead = len(queued)
                queued.append(self.trainer.queue(plan, wishes, costs, report=self._report_due(plan)))
                found = self._read(queued)
                profiled.end(number)
                best, stopped = False, found.stop
                saves = found.save or stopped or self._save_due()
                if not stopped and self._evaluation_due():
                    if saves and self.evaluation_seconds > _LONG_EVALUATION:  # the job may be killed in it
                        self.save(best=False)
                        saves = False
                    best, stopped = self._evaluate(stop)
                if best or saves or stopped:
                    self.save(best)
                if stopped:
                    break
            profiled.write()
            self.save(best=False)
            is_saved = self._save_until_written()
        except BaseException:
            self.progress.stop()
            self.saver.end()
            raise
        self.progress.stop()
        if not (is_saved or stopped):
            raise NotSaved(self.trainer.state.step)
        self.status = "stopped" if stopped else "finished"
        return self.status

    def _answer(self, stop: StopRequest) -> None:
        """Say what follows from the first signal, in a thread of its own."""
        place = "evaluation" if self.heartbeat.phase == "evaluation" else "step"
        text = f"the job stops after this {place} and saves a checkpoint"
        if self.status is not None:
            text = "training has ended and is saved; only the last evaluation and the report are missing"
        self.progress.message(f"{stop.signal}: {text}; Ctrl-C again ends it at once")

    def _check_last(self, valid: Mapping[str, float]) -> None:
        """Raise `Diverged` if the last weights give no validation loss."""
        if not math.isfinite(loss := valid.get("loss", 0.0)):
            raise Diverged(self.trainer.state.step, f"the last validation loss is {loss}")

    def finish(self, status: str) -> dict[str, Any]:
        """Test the best weights (after "finished"), write summary and report; returns the summary. Collective."""
        state = self.trainer.state
        summary = run_summary(status, self.trainer, self.environment, self.valid or {})
        if status == "finished":
            best = self._load_best()
            self.tested_step = state.best_step if best else state.step
            with nullcontext() if best else self.trainer.engine.averaged_weights():
                for split in ("valid", "test"):
                    if self.trainer.task.has_split(split) and not (split == "valid" and self.valid and not best):
                        self.heartbeat.phase = "evaluation"
                        found = self.trainer.evaluate(split).metrics
                        if split == "valid" and not best:
                            self._check_last(found)
                        summary |= of_split(split, found)
                        self.heartbeat.phase = "end"
        if self.samples is not None:
            self.samples.close()
        if self.metrics is not None:
            self.metrics.close()
            try:
                atomic.write_text(self.run.path / "summary.json", json.dumps(finite(summary), indent=1) + "\n")
            except OSError as error:
                self.warn(f"{self.run.path}: the summary could not be written: {error}")
        self.trackers.end(status, finite(summary), self.warn)
        if self.metrics is not None:
            self._write_report()  # last, as a long run's takes time, and whoever stops a job may not wait for it
        self.saver.close()
        return summary

    def _write_report(self) -> None:
        # Not at the start, which would wait for the drawing library.
        from hvd_transformer.reporting.run_report import write_report

        try:
            write_report(self.run.path)
        except (OSError, UserError) as error:
            self.warn(f"{self.run.path}: the report could not be written: {error}")
        except Exception as error:  # of the drawing library: the run is complete without
            log.exception("the report could not be written")
            self.warn(f"{self.run.path}: the report could not be written: {error}")

    def save(self, best: bool) -> None:
        """Save a checkpoint of this step, unless there is one; the replicas are compared first. Collective."""
        state = self.trainer.state
        if self.saved_step == state.step and not best:
            return
        if self.trainer.steps_without_loss:
            log.warning("step %d: not saved, as its loss is no number", state.step)
            return
        self.run.check()
        self.heartbeat.enter_phase("checkpoint")
        stopped = time.perf_counter()
        self.trainer.synchronize()
        checksum = self.trainer.engine.check_replicas(f"step {state.step}")
        begun = self.saver.begin(state.step)  # waits for the write before, so that at most one copy exists
        began = time.perf_counter()
        if begun is not None:
            self.saver.save(self.trainer.capture(self.data_digest, checksum, best, begun), begun)
        now = time.perf_counter()
        log.info(
            "step %d: checkpoint: training waited %.4f s, %.4f s of it for the copy",
            state.step,
            now - stopped,
            now - began,
        )
        self.saved_step, self.saved_at = state.step, time.monotonic()

    def _save_until_written(self) -> bool:
        """Wait for the last checkpoint; returns whether there is one. If it could not be written, as on a disk that is
        full or away for a moment, try again a few times: no other one follows. Collective."""
        state = self.trainer.state
        for pause in _PAUSES:
            self.heartbeat.enter_phase("end")
            self.saver.wait()
            if not self.world.broadcast_object(state.step in self.saver.unsaved):
                return True
            time.sleep(pause)
            self.saved_step = None
            self.save(best=self.config.checkpoint.keep_best and state.best_step == state.step)
        self.heartbeat.enter_phase("end")
        self.saver.wait()
        # An earlier one of the same step, without the result of the evaluation, is as good.
        return bool(self.world.broadcast_object(self.saver.store.has(state.step)))

    def warn(self, text: str) -> None:
        """Show a warning on rank 0's screen and in its log."""
        log.warning(text)
        self.progress.message(f"warning: {text}")

    def _read(self, queued: list[TrainingStep]) -> Wishes:
        """Read and record the steps that are queued; returns what any rank wished for in them. The last one may stay
        queued while the next one is started, unless something follows it that needs its result. Collective."""
        needed = self.trainer.engine.timeline.recording or self._save_due() or self._evaluation_due()
        keep = 1 if self.trainer.reads_late and not needed else 0
        stop = save = False
        while len(queued) > keep:
            self.heartbeat.phase, self.heartbeat.ahead = "step", 0
            result = queued.pop(0).result()
            self.step_log.record(result)
            stop, save = stop or result.totals.wishes.stop, save or result.totals.wishes.save
            if stop or save:
                keep = 0
        return Wishes(stop, save)

    def _report_due(self, plan: StepPlan) -> bool:
        """Whether what follows this step takes the sums and wishes of all ranks; local steps before go without."""
        step, every = self.trainer.state.step + 1, (self.config.training.eval_every, self.config.checkpoint.every_steps)
        due = any(period is not None and step % period == 0 for period in every)
        return due or step == 1 or not plan.remaining or self.step_log.due(step)

    def _evaluation_due(self) -> bool:
        """Whether it is time to evaluate the validation split."""
        state, every = self.trainer.state, self.config.training.eval_every
        due = state.remaining is None if every is None else state.step % every == 0
        return state.evaluated_step != state.step and (due or state.step == self.trainer.total_steps)

    def _evaluate(self, stop: StopRequest) -> tuple[bool, bool]:
        """Evaluate the validation split; returns whether to keep it as the best so far, and whether a rank was asked to
        stop meanwhile. Collective."""
        state = self.trainer.state
        state.evaluated_step = state.step
        self.saved_step = None  # a checkpoint of this step is to hold what is found
        self.heartbeat.enter_phase("evaluation")
        began = time.perf_counter()
        with self.trainer.engine.averaged_weights():
            self.valid = self.trainer.evaluate("valid").metrics
            seconds = time.perf_counter() - began
            samples = self._text_samples()
        # Whatever the last batch was: weights that give no loss are not saved.
        finite_loss = math.isfinite(self.valid.get("loss", 0.0))
        self.trainer.steps_without_loss = 0 if finite_loss else max(1, self.trainer.steps_without_loss)
        told = torch.tensor([bool(stop), time.perf_counter() - began, self._lost_bests()], dtype=torch.float64)
        stopped, self.evaluation_seconds, lost = self.world.all_reduce_(told, "evaluation.end", "max").tolist()
        if lost:  # what is the best of those that exist?
            del self.bests[-int(lost) :]
            state.best, state.best_step = self.bests[-1]
        value = chosen(self.valid, self.config.training.best_metric)
        best = is_better(value, state.best)
        state.not_better = 0 if best else state.not_better + 1
        if best:
            state.best, state.best_step = value, state.step
            self.bests.append((value, state.step))
        mark = "best so far" if best else f"best: {'none' if state.best is None else f'step {state.best_step}'}"
        self.progress.message(f"step {state.step}: {show_metrics('valid', of_split('valid', self.valid))} ({mark})")
        log.info("step %d: valid %s, %.1f s", state.step, self.valid, seconds)
        if samples and self.samples is not None:  # before the line of metrics.jsonl: the service then looks for both
            self.samples.write(state.step, samples)
        if self.metrics is not None:
            self.metrics.write(
                state.step,
                epoch=state.epoch + (0 if state.remaining is None else 1),
                **of_split("valid", self.valid),
            )
        if not stopped and (state.step == self.trainer.total_steps or self._out_of_patience()):
            self._check_last(
                self.valid
            )  # before it is saved: the next start shall not resume from weights that are NaN
        return best and self.config.checkpoint.keep_best, bool(stopped)

    def _lost_bests(self) -> int:
        """On rank 0: of how many of the best evaluations the weights could not be saved, from the last one on."""
        if not self.config.checkpoint.keep_best:
            return 0
        self.saver.poll()
        return sum(1 for _ in takewhile(lambda best: best[1] in self.saver.unsaved, reversed(self.bests)))

    def _text_samples(self) -> Sequence[Mapping[str, str]]:
        """Text samples of the model as it is now. Collective."""
        if not self.config.training.text_samples or self.valid is None or not math.isfinite(self.valid["loss"]):
            return ()  # nothing can be sampled from logits that are no numbers
        return self.trainer.text_samples("valid")

    def _out_of_patience(self) -> bool:
        patience = self.config.training.patience
        return patience is not None and self.trainer.state.not_better >= patience

    def _patience_ended(self) -> bool:
        state, patience = self.trainer.state, self.config.training.patience
        if not self._out_of_patience():
            return False
        self.progress.message(
            f"step {state.step}: {state.not_better} evaluations in a row without improvement, "
            f"training.patience={patience}: training ends"
        )
        return True

    def _save_due(self) -> bool:
        """Whether a checkpoint is due by the number of steps or epochs."""
        state, chosen = self.trainer.state, self.config.checkpoint
        if chosen.every_steps and state.step % chosen.every_steps == 0:
            return True
        ended = state.remaining is None
        return ended and chosen.every_epochs is not None and state.epoch % chosen.every_epochs == 0

    def _save_due_by_time(self) -> bool:
        """Whether a checkpoint is due by `checkpoint.every_seconds`. Rank 0's clock decides."""
        every = self.config.checkpoint.every_seconds
        return self.world.rank == 0 and every is not None and time.monotonic() - self.saved_at >= every

    def _load_best(self) -> bool:
        """Load the best weights, if they are not the last ones; returns whether it did."""
        state, step = self.trainer.state, self.trainer.state.best_step
        if not self.config.checkpoint.keep_best or step is None or step == state.step:
            return False
        # Not the link, which names an earlier one if this one could not be written.
        folder = with_verification(self.world, partial(self.run.store.whole, step))
        if not self.world.broadcast_object(folder is not None):
            self.warn(
                f"{self.run.store.folder}: the best checkpoint, of step {step}, is not there or damaged; the last "
                "weights are tested instead"
            )
            return False
        restore_weights(self.trainer.engine, folder)
        return True

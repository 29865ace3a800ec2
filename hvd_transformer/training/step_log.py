"""What steps leave on the screen, in the log and in metrics.jsonl: a line every `training.log_every` steps."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.monitoring.stall_report import Stragglers
from hvd_transformer.reporting.metrics_log import MetricsLog
from hvd_transformer.reporting.progress import ProgressDisplay
from hvd_transformer.reporting.trackers.processes import Trackers
from hvd_transformer.tasks.metrics import perplexity
from hvd_transformer.training.run_directory import RunDirectory
from hvd_transformer.training.state import StepResult
from hvd_transformer.training.step_costs import StepCosts, show_costs
from hvd_transformer.training.trainer import Trainer
from hvd_transformer.training.training_step import TrainingStep

log = logging.getLogger(__name__)


class StepLog:
    """Adds up steps, and compares the ranks; `metrics` is rank 0's. `peak`: FLOP/s of a device, if it is known."""

    def __init__(
        self,
        trainer: Trainer,
        run: RunDirectory,
        progress: ProgressDisplay,
        heartbeat: Heartbeat,
        metrics: MetricsLog | None,
        trackers: Trackers,
        warn: Callable[[str], None],
        peak: float | None,
    ) -> None:
        self._trainer, self._run, self._progress, self._heartbeat = trainer, run, progress, heartbeat
        self._metrics, self._trackers, self._warn = metrics, trackers, warn
        world = self._world = trainer.world
        self._stragglers = Stragglers(world.hosts, world.rank)
        self._costs = StepCosts(world, trainer.mesh, peak)
        heartbeat.step, heartbeat.total_steps = trainer.state.step, trainer.total_steps
        heartbeat.unit = trainer.task.unit

    def due(self, step: int) -> bool:
        """Whether this step gets a line."""
        return step % self._trainer.config.training.log_every == 0 or step == self._trainer.total_steps

    def ask(self, step: int, queued: Sequence[TrainingStep]) -> tuple[bool, Sequence[float]]:
        """What this step asks of the ranks beside the others that are `queued`: whether to compare their work, and the
        costs to sum."""
        if not self.due(step):
            return False, ()
        return self._stragglers.due and not any(other.wishes.compare for other in queued), self._costs.take()

    def record(self, result: StepResult) -> None:
        """Add a step, and write a line if one is due. Collective."""
        state, totals = self._trainer.state, result.totals
        state.seconds += result.seconds
        interval = state.interval
        interval["seconds"] += result.seconds
        interval["steps"] += 1
        known = self._heartbeat.loss, self._heartbeat.tokens_per_second
        if totals.targets and math.isfinite(totals.loss):  # the other steps of the interval keep their loss
            interval["loss"] += totals.loss * totals.targets
            interval["count"] += totals.targets
            known = totals.loss, interval["count"] / interval["seconds"]
        self._heartbeat.stepped(result.step, *known)
        slowest = self._compare_work() if totals.wishes.compare else {}
        self._stragglers.add(result.work, result.seconds)
        self._costs.add(result)
        if news := self._trainer.engine.grad_sync.wire.take_news():
            log.info(news)
            self._progress.message(news)
        due = self.due(result.step)
        if interval["count"] and (due or result.step == 1):
            self._write(result, self._costs.metrics(totals.costs) if due else {}, slowest)
            if due:
                state.interval = dict.fromkeys(interval, 0.0)

    def _write(self, result: StepResult, costs: Mapping[str, float], slowest: Mapping[str, float]) -> None:
        """The line of this interval."""
        state = self._trainer.state
        interval = state.interval
        loss = interval["loss"] / interval["count"]
        speed = interval["count"] / interval["seconds"]
        state.train_loss = loss
        task = self._trainer.task
        shown = perplexity(loss) if "perplexity" in task.metric_names else None
        more = {} if shown is None else {"perplexity": shown}
        if costs:
            self._heartbeat.mfu = costs.get("mfu")
        mfu = self._heartbeat.mfu
        self._progress.step(result.step, result.epoch + 1, loss, shown, result.learning_rate, speed, task.unit, mfu)
        milliseconds = 1000 * interval["seconds"] / interval["steps"]
        log.info(
            "epoch %d, step %d of %d, lr %.3e, %.1f ms a step, loss %.5f, gradient norm %.4f",
            result.epoch + 1, result.step, self._trainer.total_steps, result.learning_rate, milliseconds, loss,
            result.grad_norm,
        )  # fmt: skip
        if costs:
            log.info("step %d: %s", result.step, show_costs(costs))
        if self._metrics is not None:
            self._run.check()
            self._metrics.write(
                result.step,
                epoch=result.epoch + 1,
                samples=state.samples,
                loss=loss,
                **more,
                lr=result.learning_rate,
                grad_norm=result.grad_norm,
                tokens_per_second=speed,
                milliseconds_per_step=milliseconds,
                loss_scale=self._trainer.loss_scaler.scale,
                **costs,
                **slowest,
            )
            for news in self._trackers.news():
                self._warn(news)

    def _compare_work(self) -> dict[str, float]:
        """Find slow ranks; on rank 0, values for metrics.jsonl. Collective."""
        self._heartbeat.work_seconds = own = self._stragglers.take_work()
        gathered = self._world.all_gather_async(torch.tensor([own], dtype=torch.float64), "step.work")
        work: list[float] = gathered().tolist()
        return self._stragglers.judge(work, self._warn) if self._world.rank == 0 else {}

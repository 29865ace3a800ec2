"""`hvd-train` with a fault: faulty.py RANK STEP FAULT [KEY=VALUE ...], or `train` in a world that is there already.

corrupt: that rank changes one weight after that step; diverge: to no number.
die: that rank kills itself in the middle of the backward of that step.
raise: the same, with an exception.
forward-STAGE-NUMBER, backward-STAGE-NUMBER: that stage fails at that micro-batch of that step, and says when.
hang: each forward of that rank takes 0.25 s more, and the one of that step never ends.
prepare: that rank prepares its data for so many seconds, longer than any rank may be without progress.
overflow: the loss scale of that rank's float16 starts so high that the first steps are left out.
"""

import math
import os
import signal
import sys
import time
from unittest.mock import patch

import torch

from hvd_transformer.cli.train import main
from hvd_transformer.comm.horovod_env import launched
from hvd_transformer.gradients.sync import GradSync
from hvd_transformer.monitoring import watchdog
from hvd_transformer.parallel.engine import Engine
from hvd_transformer.parallel.precision import LossScaler
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.training.training_step import TrainingStep

RANK, STEP, FAULT = 0, 0, ""


def corrupt_after_a_step() -> None:
    original = TrainingStep.result

    def result(step):
        found = original(step)
        if found.step == STEP:
            step.trainer.engine.wait_params()
            step.trainer.engine.buffers[-1].parameters[3] += math.nan if FAULT == "diverge" else 1e-6
        return found

    patch.object(TrainingStep, "result", result).start()


def fail_in_a_backward() -> None:
    original = GradSync.begin_step
    calls = 0

    def fail(*_):
        if FAULT == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("this rank has a fault")

    def begin_step(sync, *words, **options):
        nonlocal calls
        calls += 1
        if calls == STEP:
            sync.buffers[len(sync.buffers) // 2].slots[0].parameter.register_hook(fail)
        original(sync, *words, **options)

    patch.object(GradSync, "begin_step", begin_step).start()


def fail_in_a_stage() -> None:
    """In the stage's first layer. Memory runs out in a forward."""
    direction, stage, number = FAULT.split("-")
    original = Engine.__init__

    def init(engine, *words, **options):
        original(engine, *words, **options)
        failing, *others = engine.stages[int(stage)].layers
        calls, fatal = 0, (STEP - 1) * engine.config.parallel.micro_batches + int(number) + 1

        def fail(*_):
            kind = torch.OutOfMemoryError if direction == "forward" else RuntimeError
            raise kind(f"failed on purpose at {time.time():.3f}")

        def run(*tensors):
            nonlocal calls
            calls += torch.is_grad_enabled()  # not in evaluation
            if calls == fatal and direction == "forward":
                fail()
            result = failing.run(*tensors)
            if calls == fatal:
                result.register_hook(fail)
            return result

        engine.stages[int(stage)].layers = [failing._replace(run=run), *others]

    patch.object(Engine, "__init__", init).start()


def hang_in_a_forward() -> None:
    original = Engine.__init__

    def init(engine, *words, **options):
        original(engine, *words, **options)
        (stage,) = engine.stages
        first, *others = stage.layers
        calls = 0

        def hang_on_purpose():
            while True:
                time.sleep(1)

        def run(*tensors):
            nonlocal calls
            calls += torch.is_grad_enabled()  # not in evaluation
            time.sleep(0.25)
            if calls == STEP:
                hang_on_purpose()
            return first.run(*tensors)

        stage.layers = [first._replace(run=run), *others]

    patch.object(Engine, "__init__", init).start()


def prepare_long() -> None:
    original = LanguageModelTask.prepare

    def prepare_data(config, context):
        end = time.monotonic() + STEP
        while time.monotonic() < end:
            assert not context.should_stop()
            time.sleep(0.2)
        return original(config, context)

    patch.object(LanguageModelTask, "prepare", prepare_data).start()


def overflow_at_first() -> None:
    original = LossScaler.__init__

    def init(scaler, *words):
        original(scaler, *words)
        scaler.scale = 2.0**40

    patch.object(LossScaler, "__init__", init).start()


FAULTS = {
    "corrupt": corrupt_after_a_step,
    "diverge": corrupt_after_a_step,
    "die": fail_in_a_backward,
    "raise": fail_in_a_backward,
    "hang": hang_in_a_forward,
    "overflow": overflow_at_first,
    "prepare": prepare_long,
}


def train(rank: int, step: int, fault: str, words: list[str]) -> tuple[int, str, str]:
    """Exit code and what was printed; the next run has no fault."""
    from commands import command

    prepare(rank, step, fault)
    try:
        done = command("hvd-train", *words)
    finally:
        patch.stopall()
    return done.returncode, done.stdout, done.stderr


def prepare(rank: int, step: int, fault: str) -> None:
    global RANK, STEP, FAULT
    RANK, STEP, FAULT = rank, step, fault
    if fault == "prepare":
        patch.object(watchdog, "_UNKNOWN_SECONDS", 0.6 * STEP).start()
    if launched().rank == rank:
        FAULTS.get(fault, fail_in_a_stage)()


if __name__ == "__main__":
    prepare(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.argv[1:4] = []
    main()

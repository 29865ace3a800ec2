"""`hvd-train` with a fault: faulty.py RANK STEP FAULT [KEY=VALUE ...].

corrupt: that rank changes one weight after that step.
die: that rank kills itself in the middle of the backward of that step.
raise: the same, with an exception.
overflow: the loss scale of that rank's float16 starts so high that the first steps are left out.
"""

import os
import signal
import sys

from hvd_transformer.cli.train import main
from hvd_transformer.comm.environment import launched
from hvd_transformer.parallel.reducer import GradientReducer
from hvd_transformer.training.loop import Trainer
from hvd_transformer.training.precision import LossScaler

RANK, STEP, FAULT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def corrupt_after_a_step() -> None:
    original = Trainer.step

    def step(trainer, *words, **wishes):
        result = original(trainer, *words, **wishes)
        if trainer.position.step == STEP:
            trainer.buckets[-1].parameters[3] += 1e-6
        return result

    Trainer.step = step


def fail_in_a_backward() -> None:
    original = GradientReducer.begin
    calls = 0

    def fail(*_):
        if FAULT == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("this rank has a fault")

    def begin(reducer):
        nonlocal calls
        calls += 1
        if calls == STEP:
            buckets = reducer.buckets
            buckets[len(buckets) // 2].slots[0].parameter.register_hook(fail)
        original(reducer)

    GradientReducer.begin = begin


def overflow_at_first() -> None:
    original = LossScaler.__init__

    def init(scaler, *words):
        original(scaler, *words)
        scaler.scale = 2.0**40

    LossScaler.__init__ = init


FAULTS = {
    "corrupt": corrupt_after_a_step,
    "die": fail_in_a_backward,
    "raise": fail_in_a_backward,
    "overflow": overflow_at_first,
}
if launched().rank == RANK:
    FAULTS[FAULT]()
sys.argv[1:4] = []
main()

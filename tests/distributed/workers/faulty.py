"""`hvd-train` with a fault: faulty.py RANK STEP FAULT [KEY=VALUE ...].

corrupt: that rank changes one weight after that step.
die: that rank kills itself in the middle of the backward of that step.
raise: the same, with an exception.
"""

import os
import signal
import sys

from hvd_transformer.cli.train import main
from hvd_transformer.comm.environment import launched
from hvd_transformer.parallel.reducer import GradientReducer
from hvd_transformer.training.loop import Trainer

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
    original = GradientReducer.last
    calls = 0

    def fail(*_):
        if FAULT == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("this rank has a fault")

    def last(reducer):
        nonlocal calls
        calls += 1
        if calls == STEP:  # one round a step
            buckets = reducer.buckets
            buckets[len(buckets) // 2].slots[0].parameter.register_hook(fail)
        original(reducer)

    GradientReducer.last = last


if launched().rank == RANK:
    corrupt_after_a_step() if FAULT == "corrupt" else fail_in_a_backward()
sys.argv[1:4] = []
main()

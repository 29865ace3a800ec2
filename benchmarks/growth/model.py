"""The costs of a job by the size of its model: layers, parameters (the width), vocabulary. One rank, one thread.

A job of `training.train_job` runs to its first step, and what follows is measured on it; a second one resumes from the
checkpoint of the first.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.growth.fit import Point
from benchmarks.growth.stopwatch import Stopwatch, seconds
from hvd_transformer.checkpoint.restore import read_checked
from hvd_transformer.comm.world import World
from hvd_transformer.config import Config, load
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.planning.memory_plan import make_plan
from hvd_transformer.planning.plan_text import plan_text
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.training import train_job
from hvd_transformer.training.process import StopRequest
from hvd_transformer.training.session import Session
from hvd_transformer.training.trainer import Trainer

SETTINGS = (
    "data.tokenizer=basic_english", "data.sequence_length=8", "data.workers=1",
    "model.d_model=32", "model.num_heads=2", "model.d_feedforward=128", "model.max_length=8", "model.num_layers=4",
    "model.dropout=0.0", "training.batch_size=2", "training.eval_batch_size=8", "training.device=cpu",
    "training.epochs=1000000", "optimizer.lr=1e-4",
)  # fmt: skip
WORDS = 200  # of the vocabulary
_STARTS, _REPEATS = 3, 7


class _Enough(Exception):
    """Leaves a job."""


def layers(number: int) -> dict[str, Point]:
    """By blocks of width 32."""
    return measure(number, [f"model.num_layers={number}"])


def parameters(width: int) -> dict[str, Point]:
    """By all parameters of 4 blocks of this width."""
    return measure(None, [f"model.d_model={width}", f"model.d_feedforward={4 * width}", "model.num_heads=4"])


def vocabulary(size: int) -> dict[str, Point]:
    """By words."""
    return measure(size, ["model.num_layers=2"], num_words=size)


def measure(n: float | None, settings: Sequence[str], num_words: int = WORDS) -> dict[str, Point]:
    """Every cost of this model, by name. `n`: its size; None: its parameters."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        folder = Path(name)
        write_text(folder / "text", num_words)
        words = [*SETTINGS, *settings, f"data.source={folder / 'text'}", f"data.cache_dir={folder / 'cache'}"]

        def config(run: str) -> Config:
            return load(overrides=[*words, f"output_dir={folder / run}"])

        first_step(config("warm"))  # prepares the data, and imports what comes late
        found: dict[str, list[float]] = {}
        scales: dict[str, float] = {}

        def of_job(session: Session) -> None:
            nonlocal n
            n = n or session.trainer.engine.num_parameters
            ours, plain = steps(session.trainer)
            found["step beside its arithmetic"] = [ours - plain]
            scales["step beside its arithmetic"] = ours
            found["checkpoint's stall"] = [stall(session)]
            found["evaluation"] = [least(lambda: session.trainer.evaluate("valid"))]

        def of_resumed(session: Session) -> None:
            folder = session.run.store.steps()[-1]
            state = read_checked(folder, session.data_digest, {}, session.world)
            assert state is not None
            found["load"] = [least(lambda: session.trainer.restore(folder, state))]

        found["start"] = [min(first_step(config(f"start-{number}")) for number in range(_STARTS))]
        first_step(config("run"), of_job)
        found["resume"] = [min(first_step(config("run"), of_resumed) for _ in range(_STARTS))]
        found["plan"] = [seconds(lambda: plan_text(make_plan(config("run"), num_words), 80))]
        assert n is not None
        return {name: Point(n, values, scales.get(name)) for name, values in found.items()}


def first_step(config: Config, then: Callable[[Session], None] = lambda _: None) -> float:
    """Seconds from the start of a job to the end of its first step; `then` has it for itself."""
    took = 0.0
    watch = Stopwatch()

    class Measured(Session):
        def train(self, stop: StopRequest) -> str:
            nonlocal took
            self.trainer.step(next(self.trainer.steps()))
            took = watch.seconds()
            then(self)
            self.saver.close()
            self.run.release()
            raise _Enough

    with patch.object(train_job, "Session", Measured), suppress(_Enough), redirect_stdout(StringIO()):
        train_job.run(config, World(), StopRequest())
    return took


def steps(trainer: Trainer) -> tuple[float, float]:
    """Least seconds of a step, and of torch alone: forward, backward, clipping and update of the same model."""
    task = trainer.task
    assert isinstance(task, LanguageModelTask)
    model = LanguageModel(task.data.tokenizer.vocab_size, trainer.config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def torch_step(inputs: Tensor, targets: Tensor) -> None:
        (model.head.loss(model.hidden(inputs), targets) / targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ours, plain = [], []
    for plan in islice(trainer.steps(), 3 * _REPEATS):
        batch = trainer.task.batch(trainer.state.epoch, plan.accumulation[0])
        ours.append(seconds(partial(trainer.step, plan)))
        plain.append(seconds(partial(torch_step, *batch)))
    return min(ours), min(plain)


def stall(session: Session) -> float:
    """Least seconds that training stands still for a checkpoint; each is written before the next."""
    plans, found = session.trainer.steps(), []
    for _ in range(_REPEATS):
        session.trainer.step(next(plans))
        found.append(seconds(lambda: session.save(best=False)))
        session.saver.wait()
    return min(found)


def least(action: Callable[[], object], repeats: int = _REPEATS) -> float:
    """The shortest of some times."""
    return min(seconds(action) for _ in range(repeats))


def write_text(folder: Path, num_words: int) -> None:
    """Each word once to train on, in lines of ten, and the first ones again; validation is the same for all."""
    lines = [" ".join(f"w{number}" for number in range(start, start + 10)) for start in range(0, num_words, 10)]
    folder.mkdir()
    (folder / "train.txt").write_text("\n".join([*lines, *lines[:20] * 20]) + "\n")
    for split in ("valid", "test"):
        (folder / f"{split}.txt").write_text("\n".join(lines[:20]) + "\n")

"""`evaluate` takes what any run has kept: the settings of how it was trained do not keep it from being evaluated."""

from pathlib import Path

import pytest

from hvd_transformer.checkpoint.saved_run import Checkpoint
from hvd_transformer.config import load
from hvd_transformer.config.load import preset_names
from hvd_transformer.config.schema import flatten
from hvd_transformer.training.evaluate_job import Request, evaluation_config

# Keys that are refused beside another optimizer, schedule or number of ranks than they belong to.
OF_TRAINING = {
    "sgd": ["optimizer.name=sgd", "optimizer.momentum=0.9"],
    "adam": ["optimizer.name=adam", "optimizer.eps=1e-9", "optimizer.betas=[0.9, 0.98]"],
    "muon": ["optimizer.name=muon", "optimizer.schedule=wsd", "optimizer.decay_fraction=0.4", "optimizer.ema=0.9"],
    "step": ["optimizer.schedule=step", "optimizer.step_epochs=2"],
    "powersgd": ["communication.compression=powersgd", "communication.powersgd_rank=2"],
    "local steps": ["communication.local_steps=4", "communication.outer_lr=0.5"],
    "shared": ["parallel.tensor=2", "parallel.vocab_parallel=true", "parallel.pipeline=2"],
    "sharded": ["parallel.optimizer_shard=gradients", "parallel.recompute=always"],
}
CASES = {name: (name, []) for name in preset_names()} | {name: (None, words) for name, words in OF_TRAINING.items()}


@pytest.mark.parametrize(("preset", "words"), CASES.values(), ids=CASES)
def test_every_run_can_be_evaluated(preset: str | None, words: list[str], tmp_path: Path) -> None:
    config = load(preset, overrides=words)
    found = evaluation_config(Checkpoint(tmp_path, {"config": flatten(config)}, {}), Request(tmp_path))
    kept = config.model_dump(exclude={"optimizer", "parallel", "communication", "training"})
    assert found.model_dump(exclude={"optimizer", "parallel", "communication", "training"}) == kept

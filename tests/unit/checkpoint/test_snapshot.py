"""A job goes on from its files as if it had never stopped, however its parameters lie in buckets."""

import json
from pathlib import Path

import pytest
import torch
from fragments import tensors_of
from small_job import run, settings, trainer, weights

from hvd_transformer.checkpoint.restore import read_checked, restore_weights
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, CheckpointStore
from hvd_transformer.checkpoint.stored_tensors import StoredTensors
from hvd_transformer.checkpoint.writer import Saver
from hvd_transformer.comm.world import World
from hvd_transformer.errors import UserError
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

SETTINGS = [
    "model.dropout=0.1",
    "training.max_steps=14",
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=3",
    "training.accumulation=2",
]
OPTIMIZERS = {
    "sgd": ["optimizer.name=sgd"],
    "momentum": ["optimizer.name=sgd", "optimizer.momentum=0.9"],
    "adamw": ["optimizer.name=adamw"],
}


def saved(job: Trainer, folder: Path) -> Path:
    return CheckpointStore(folder, keep_last=9).save(job.capture("digest", checksum=5, best=False))


def resumed(checkpoint: Path, *overrides: str) -> Trainer:
    saved = read_checked(checkpoint, "digest", {}, World())
    job = trainer(settings(*overrides), position=TrainState.load(saved["position"]))
    with torch.no_grad():
        for bucket in job.engine.buffers:
            bucket.parameters.fill_(7)  # whatever was there before
    job.restore(checkpoint, saved)
    return job


def test_restoring_tells_of_its_progress(tmp_path: Path) -> None:
    job = trainer(settings())
    run(job, 1)
    path, before = saved(job, tmp_path), job.world.link.ended
    job.restore(path, read_checked(path, "digest", {}, World()))
    tensors = [name for file in (MODEL, OPTIMIZER) for name in StoredTensors(path, file).names]
    assert job.world.link.ended - before >= len(tensors) > 2


def everything(job: Trainer) -> dict[str, torch.Tensor]:
    taken = tensors_of(job.capture("digest", 0, False))
    return {f"{file}/{name}": tensor for file, tensors in taken.items() for name, tensor in tensors.items()}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("batching", ["windows", "columns"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_broken_job_ends_with_the_weights_of_an_unbroken_one(
    optimizer: str, batching: str, precision: str, tmp_path: Path
) -> None:
    words = [*SETTINGS, *OPTIMIZERS[optimizer], f"data.batching={batching}", f"training.precision={precision}"]
    unbroken = trainer(settings(*words))
    losses = run(unbroken)
    first = trainer(settings(*words))
    before = run(first, 4)  # in the middle of the first epoch
    second = resumed(saved(first, tmp_path), *words)
    middle = run(second, 5)
    third = resumed(saved(second, tmp_path), *words)
    assert before + middle + run(third) == losses
    for name, weight in weights(unbroken).items():
        assert torch.equal(weights(third)[name], weight), name
    assert third.state == unbroken.state
    if precision == "fp16":
        assert third.loss_scaler.state() == unbroken.loss_scaler.state()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("here", "there"), [(8.0, 1e-6), (1e-6, 8.0), (0.001, 0.0005)])
def test_the_state_is_exact_under_other_bucket_sizes(optimizer: str, here: float, there: float, tmp_path: Path) -> None:
    words = [*SETTINGS, *OPTIMIZERS[optimizer]]
    job = trainer(settings(*words, f"communication.bucket_mb={here}"))
    run(job, 3)
    other = resumed(saved(job, tmp_path), *words, f"communication.bucket_mb={there}")
    assert len(other.engine.buffers) != len(job.engine.buffers)
    old, new = everything(job), everything(other)
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert torch.equal(new[name], tensor) and new[name].dtype == tensor.dtype, name
    # And it trains on to the same place, but for the order in which the norm is summed.
    assert run(other) == pytest.approx(run(job), rel=1e-4)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("here", "there"), [(4, 1), (1, 3), (4, 2)])
def test_a_checkpoint_does_not_depend_on_the_stages(here: int, there: int, tmp_path: Path) -> None:
    words = [*SETTINGS, "model.num_layers=2", "optimizer.clip_norm=0.01", "parallel.micro_batches=2"]
    losses = run(trainer(settings(*words)))
    first = trainer(settings(*words, f"parallel.pipeline={here}"))
    before = run(first, 5)
    second = resumed(saved(first, tmp_path), *words, f"parallel.pipeline={there}")
    assert before + run(second) == losses


def test_a_snapshot_is_a_copy() -> None:
    job = trainer(settings("optimizer.name=adamw"))
    run(job, 2)
    taken = job.capture("digest", 0, False)
    before = {name: tensor.clone() for tensors in tensors_of(taken).values() for name, tensor in tensors.items()}
    position = json.dumps(taken.state)
    run(job, 2)
    for tensors in tensors_of(taken).values():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), name
    assert json.dumps(taken.state) == position


def test_a_copy_uses_the_memory_of_the_one_before(tmp_path: Path) -> None:
    job, store = trainer(settings("optimizer.name=adamw")), CheckpointStore(tmp_path, keep_last=9)
    saver = Saver(store, job.world, pytest.fail)
    memory, wanted = set(), []
    for step in (1, 2, 3):
        run(job, step)
        begun = saver.begin(step)
        assert begun is not None
        taken = job.capture("digest", 0, False, begun)
        memory.add(tuple(block.data_ptr() for part in taken.parts.values() for _, block in part.blocks))
        wanted.append({name: tensor.clone() for name, tensor in weights(job).items()})
        saver.save(taken, begun)
    saver.close()
    assert len(memory) == 1
    for path, tensors in zip(store.steps(), wanted, strict=True):
        found = StoredTensors(path, MODEL)
        assert all(torch.equal(found.whole(name), tensor) for name, tensor in tensors.items())


def test_the_files_name_every_weight_once_and_its_moments() -> None:
    job = trainer(settings("optimizer.name=adamw"))
    run(job, 1)
    taken = job.capture("digest", 77, True)
    names = set(weights(job))
    tensors = tensors_of(taken)
    assert set(tensors[MODEL]) == names
    assert set(tensors[OPTIMIZER]) == {f"{key}.{name}" for key in ("exp_avg", "exp_avg_sq") for name in names}
    assert taken.best and taken.step == 1 and taken.state["weights_checksum"] == 77
    assert json.loads(json.dumps(taken.state))["config"] == taken.state["config"]


def test_a_position_survives_json() -> None:
    position = TrainState(step=5, updates=4, epoch=2, remaining=[(3, 7), (9, 20)], samples=99, best=1.5, best_step=2)
    position.interval["loss"] = 0.1 + 0.2
    assert TrainState.load(json.loads(json.dumps(position.state()))) == position


def test_without_a_checkpoint_a_job_begins_at_the_beginning() -> None:
    assert read_checked(None, "digest", {}, World()) is None


def test_other_tokens_and_other_formats_are_refused(tmp_path: Path) -> None:
    job = trainer(settings())
    run(job, 1)
    checkpoint = saved(job, tmp_path)
    with pytest.raises(UserError, match="trained on other data than data.source gives now"):
        read_checked(checkpoint, "another digest", {}, World())
    state = json.loads((checkpoint / "state.json").read_text())
    # Another version may describe the same tokens in other words.
    (checkpoint / "state.json").write_text(json.dumps(state | {"splits": {"train": "a", "valid": "b"}}))
    assert read_checked(checkpoint, "another digest", {"train": "a", "valid": "b"}, World()) is not None
    for others in ({"train": "a", "valid": "c"}, {"train": "a"}, {}):
        with pytest.raises(UserError, match="trained on other data than data.source gives now"):
            read_checked(checkpoint, "another digest", others, World())
    (checkpoint / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(UserError, match="format 99, but this version reads formats 2 and 3"):
        read_checked(checkpoint, "digest", {}, World())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model.d_feedforward=16", "blocks.0.feedforward.input.weight is [12, 8], not [16, 8]"),
        ("model.num_layers=2", "blocks.1.attention.output.bias is in the model but not in the file"),
        ("model.tie_embeddings=false", "head.bias is in the model but not in the file"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_weight(change: str, named: str, tmp_path: Path) -> None:
    job = trainer(settings())
    run(job, 1)
    checkpoint = saved(job, tmp_path)
    with pytest.raises(UserError) as caught:
        restore_weights(trainer(settings(change)).engine, checkpoint)
    assert str(caught.value).startswith(str(checkpoint / MODEL))
    assert f"of another model: {named}" in str(caught.value)

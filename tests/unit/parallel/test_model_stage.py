"""What all ranks of a tensor group hold whole lies in equal buffers on all of them, so that it is added up alike."""

import pytest
import small_job
from small_job import settings, trainer
from thread_world import make_worlds, on_ranks

from hvd_transformer.comm.world import World
from hvd_transformer.parallel.mesh import ParallelMesh


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
@pytest.mark.parametrize(
    "words",
    [
        ["model.position=learned"],  # a vocabulary of 11, of which the ranks have 6 and 5
        ["model.position=learned", "model.tie_embeddings=false", "communication.bucket_mb=0.001"],
        ["model.position=learned", "model.num_layers=3", "communication.bucket_mb=0.003"],
        ["model.position=learned", "optimizer.name=muon"],
    ],
)
def test_unsplit_weights_have_the_same_places(
    words: list[str], hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one of three replicas; the sum of two is the same in any order."""
    monkeypatch.setattr(small_job, "ParallelMesh", lambda **given: ParallelMesh(**{**given, "dp": 3}))
    config = settings("parallel.tensor=2", "parallel.vocab_parallel=true", "communication.embedding_rows=never", *words)

    def places(world: World) -> tuple[int, dict[str, tuple[int, int]]]:
        job = trainer(config, world)
        buffers = [(buffer, slot) for buffer in job.engine.buffers for slot in buffer.slots]
        whole = sum(weight.numel() for weight in job.task.model.parameters())
        return whole, {
            slot.name: (buffer.parameters.numel(), slot.start)
            for buffer, slot in buffers
            if slot.name not in job.task.cuts
        }

    (first, own), (second, other) = on_ranks(make_worlds(2, hosts), places)
    assert own == other and len(own) > 4
    assert first != second  # the shards of the vocabulary are not equal

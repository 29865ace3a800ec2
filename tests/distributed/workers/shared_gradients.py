"""A case for the ranks of a world: training with gradients in memory that the ranks share."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import small_job

from hvd_transformer.comm.world import World


def trained(shares: bool) -> dict[str, Any]:
    """Some steps, with gradients in memory that the ranks share or not: losses, and bytes of gradients."""
    world, before = World.start(), _files()
    wide = ("model.d_model=64", "model.d_feedforward=256", "optimizer.lr=0.01", "communication.bucket_mb=0.1")
    with patch.object(world.link, "shared_buffers", world.link.shared_buffers if shares else None):
        job = small_job.trainer(small_job.settings(*wide), world, replica=world.rank)
    losses = small_job.run(job, 3)
    gradients = sum(buffer.gradients.nbytes for buffer in job.engine.buffers)
    job.engine.check_replicas("at the end")
    job.close()
    return {
        "buffers": len(job.engine.buffers),
        "files": len(_files() - before),
        "losses": losses,
        "gradients": gradients,
        "of_others": world.bytes_of_others,
    }


def _files() -> set[str]:
    """The inodes of the shared buffers that this process has mapped: its own, and those of others."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    return {words[4] for words in maps if words[5:] and words[5] == "/memfd:horovod"}

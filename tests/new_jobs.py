"""Jobs for tests of the store."""

from typing import Any

from hvd_transformer.service.jobs import ID, Allocation, Needs, Placement
from hvd_transformer.service.storage.store import NewJob


def new_job(name: str = "job", **fields: Any) -> NewJob:
    """A job of ann, of one rank."""
    defaults = {
        "name": name,
        "owner": "ann",
        "submitted": 1000.0,
        "needs": Needs(1, 1),
        "output_dir": f"/runs/{name}-{ID}",
        "folder": "/home/ann",
        "words": ("task=language_model", f"output_dir=/runs/{name}-{ID}"),
        "config": {"task": "language_model", "output_dir": f"/runs/{name}-{ID}"},
    }
    return NewJob(**{**defaults, **fields})


def on(host: str, ranks: int = 1, *gpus: int) -> Allocation:
    """An allocation on one host."""
    return (Placement(host, ranks, gpus),)

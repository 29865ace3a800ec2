"""Errors of compressed gradients, other ones on each rank: read back bit for bit, and their sum on other replicas."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layout import Case, engines, save, together, values_of
from torch import Tensor

from hvd_transformer.checkpoint import exchange, restore
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, WIRE

SHAPES = {"input": (9, 7), "output": (7, 9), "bias": (9,)}
SPLITS = {"input": (0, 1), "output": (1, 1)}


def make(hosts: Sequence[str], tp: int, seed: int | None) -> list[Any]:
    """The ranks' engines: with errors of their own and a factor that replicas share, or as in a new run."""
    case = Case(SHAPES, SPLITS, tuple(hosts), tp)
    ranks = engines(case, values_of(case, 1))
    for rank, engine in enumerate(ranks):
        sizes = {slot.name: slot.parameter.numel() for buffer in engine.buffers for slot in buffer.slots}
        generator = torch.Generator().manual_seed(rank if seed is None else seed + rank)
        tensors = {
            f"error.{name}": torch.zeros(size) if seed is None else torch.randn(size, generator=generator)
            for name, size in sizes.items()
        }
        tensors["factor.input"] = torch.full((5,), -1.0 if seed is None else rank % tp + 0.5)
        engine.grad_sync.wire.tensors = lambda tensors=tensors: tensors
    return ranks


def kept(engine: Any) -> dict[str, Tensor]:
    return dict(engine.grad_sync.wire.tensors())


def store(ranks: Sequence[Any], tp: int, folder: Path, blind: Sequence[int] = ()) -> Path:
    case = Case(SHAPES, SPLITS, tuple(engine.world.hosts[engine.world.rank] for engine in ranks), tp)
    return save(case, ranks, folder, blind)


def load(ranks: Sequence[Any], path: Path) -> None:
    together(ranks, lambda engine: restore.restore_wire(engine, path if engine.world.rank == 0 else None))


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abab"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sees", [True, False])
def test_each_rank_gets_its_own_back(
    sees: bool, tp: int, hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the first host sees the folder. The ranks of a tensor group have pieces of unequal size."""
    monkeypatch.setattr(exchange, "EXCHANGE_BYTES", 300)
    monkeypatch.setattr(restore, "SEND_BYTES", 100)
    before, after = make(hosts, tp, seed=7), make(hosts, tp, seed=None)
    blind = [] if sees else [rank for rank, host in enumerate(hosts) if host != "a"]
    path = store(before, tp, tmp_path, blind)
    monkeypatch.setattr("hvd_transformer.checkpoint.shared_folder.seen_by", lambda world, _: [
        rank not in blind for rank in range(world.size)
    ])  # fmt: skip
    load(after, path)
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(tensor, kept(new)[name]) for name, tensor in kept(old).items())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("old", "new"), [(4, 2), (3, 2), (2, 3), (1, 4), (5, 1)])
def test_on_other_replicas_the_sum_of_the_errors_stays(old: int, new: int, tp: int, tmp_path: Path) -> None:
    before, after = make("a" * old * tp, tp, seed=7), make("a" * new * tp, tp, seed=None)
    load(after, store(before, tp, tmp_path))
    for place in range(tp):
        for name in kept(before[place]):
            sums = [sum(kept(engine)[name] for engine in ranks[place::tp]) for ranks in (before, after)]
            if name.startswith("error."):
                torch.testing.assert_close(sums[1], sums[0], rtol=1e-5, atol=1e-6)
            else:
                assert all(torch.equal(kept(engine)[name], kept(before[place])[name]) for engine in after[place::tp])


def test_with_other_tensor_groups_or_without_a_file_a_run_starts_without_errors(tmp_path: Path) -> None:
    path = store(make("aa", 2, seed=7), 2, tmp_path / "of-two")
    for folder in (path, tmp_path):
        ranks = make("aa", 1, seed=None)
        load(ranks, folder)
        assert not any(kept(engine)["error.bias"].any() for engine in ranks)


def test_without_errors_there_is_no_file(tmp_path: Path) -> None:
    case = Case(SHAPES, SPLITS, ("a", "a"))
    path = save(case, engines(case, values_of(case, 1)), tmp_path)
    assert {file.name for file in path.glob("*.safetensors")} == {MODEL, OPTIMIZER}
    assert (store(make("aa", 1, seed=7), 1, tmp_path / "other") / WIRE).is_file()

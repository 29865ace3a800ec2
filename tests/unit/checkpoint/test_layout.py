"""Every byte of a checkpoint is written by one rank, each host writes its own files, and any reader finds the tensors."""

import json
import os
import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hvd_transformer.checkpoint import capture, exchange, manifest, restore, staging, tensor_file
from hvd_transformer.checkpoint.crc import Range
from hvd_transformer.checkpoint.layout import Writers
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, CheckpointStore, Snapshot
from hvd_transformer.checkpoint.stored_tensors import StoredTensors
from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.buffers import WHOLE, ZeroShard, make_grad_buffers
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.tensor_parallel import piece

KEYS = ("exp_avg", "exp_avg_sq")
PAGE = 4096


class ThreadGroup(Group):
    """Ranks that are threads of this process."""

    def __init__(self, ranks: Sequence[int], rank: int, shared: dict[str, Any]) -> None:
        self.ranks, self.rank, self.size = list(ranks), list(ranks).index(rank), len(ranks)
        self._shared = shared
        self.received = 0  # bytes, by `all_to_all`
        self.hosts: list[str] = []

    def _swap(self, value: Any) -> list[Any]:
        values, barrier = self._shared["values"], self._shared["barrier"]
        values[self.rank] = value
        barrier.wait()
        found = list(values)
        barrier.wait()
        return found

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [json.loads(own) for own in self._swap(json.dumps(value))]

    def all_gather_async(self, tensor: Tensor, name: str) -> Any:
        return lambda: torch.cat(self._swap(tensor))

    def all_to_all(self, tensor: Tensor, counts: Sequence[int], name: str) -> Tensor:
        assert sum(counts) == tensor.numel()
        found = torch.cat([parts[self.rank] for parts in self._swap(tensor.clone().split(list(counts)))])
        self.received += found.nbytes
        return found


def groups(ranks: Sequence[int]) -> dict[int, ThreadGroup]:
    """One object per rank of a group."""
    shared = {"values": [None] * len(ranks), "barrier": threading.Barrier(len(ranks), timeout=60)}
    return {rank: ThreadGroup(ranks, rank, shared) for rank in ranks}


@dataclass(frozen=True)
class Case:
    """A model's shapes and splits, and how its ranks are laid out."""

    shapes: Mapping[str, tuple[int, ...]]
    splits: Mapping[str, tuple[int, int]]
    hosts: tuple[str, ...]  # by rank
    tp: int = 1
    zero: bool = False
    bucket: int = 3000  # bytes
    dtypes: Mapping[str, torch.dtype] | None = None


def values_of(case: Case, seed: int) -> dict[str, Tensor]:
    """The whole tensors of the model and of its optimizer state."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{prefix}{name}": torch.randn(shape, generator=generator)
        for prefix in ("", *(f"{key}." for key in KEYS))
        for name, shape in case.shapes.items()
    }


def engines(case: Case, values: Mapping[str, Tensor]) -> list[Any]:
    """What checkpoints use of every rank's engine."""
    size, tp = len(case.hosts), case.tp
    dp = size // tp
    world = groups(range(size))
    of_tensor = [group for first in range(0, size, tp) for group in groups(range(first, first + tp)).values()]
    found = []
    for rank in range(size):
        world[rank].hosts = list(case.hosts)
        shard = ZeroShard(rank // tp, dp) if case.zero and dp > 1 else WHOLE

        def own(name: str, whole: Tensor, place: int = rank % tp) -> Tensor:
            return piece(whole, case.splits[name], place, tp) if tp > 1 and name in case.splits else whole

        weights = {name: nn.Parameter(own(name, values[name]).clone()) for name in case.shapes}
        buffers = make_grad_buffers(weights, {name for name in weights if "bias" in name}, case.bucket, shard=shard)
        state = []
        for buffer in buffers:
            state.append({})
            for key in KEYS:
                flat = torch.zeros_like(buffer.parameters)
                for slot in buffer.slots:
                    slot.view(flat).copy_(own(slot.name, values[f"{key}.{slot.name}"]))
                state[-1][key] = flat[buffer.own].clone()
        mesh = ParallelMesh(
            dp=dp, tp=tp, dp_rank=rank // tp, tp_rank=rank % tp, devices=(torch.device("cpu"),),
            dp_group=world[rank], tp_group=of_tensor[rank], zero_shard=shard,
        )  # fmt: skip
        found.append(
            SimpleNamespace(
                world=world[rank], mesh=mesh, buffers=buffers, shapes=case.shapes, splits=case.splits if tp > 1 else {},
                optimizer_state=lambda state=state: state, wait_params=lambda: None, set_updates=lambda number: None,
                config=SimpleNamespace(optimizer=SimpleNamespace(name="adamw", momentum=0.0)),
            )
        )  # fmt: skip
    return found


def together(ranks: Sequence[Any], action: Any) -> list[Any]:
    """The action of every rank, side by side."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(action, rank) for rank in ranks]
    failed = [error for error in (future.exception() for future in futures) if error is not None]
    assert not failed, failed
    return [future.result() for future in futures]


Write = tuple[int, str, int, int]  # rank, file, start, stop


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Write]:
    """Every write of tensors, as the system sees it. `current` says which rank a thread is."""
    found: list[Write] = []
    pwrite = os.pwrite

    def note(descriptor: int, data: memoryview, place: int) -> int:
        file = Path(f"/proc/self/fd/{descriptor}").readlink().name
        found.append((current.rank, file, place, place + len(data)))
        return pwrite(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", note)
    return found


current = threading.local()


def save(case: Case, ranks: Sequence[Any], folder: Path, blind: Sequence[int] = ()) -> Path:
    """A checkpoint by all ranks."""
    store = CheckpointStore(folder, keep_last=1)
    staged = store.begin(1)
    sees = [rank not in blind for rank in range(len(ranks))]
    writers = Writers.of(case.hosts, sees)
    ending = Event()

    def of_rank(engine: Any) -> Path | None:
        rank = current.rank = engine.world.rank
        if rank and sees[rank]:
            assert staging.enter(staged, rank)
        taken = capture.capture(engine, 1, {"data_digest": "d"}, {}, False, writers)
        assert rank not in blind or not taken.parts
        if rank == 0:
            return store.save(taken, staged, ending)
        if sees[rank]:
            store.save_part(taken, staged, rank, ending)
        return None

    path, *_ = together(ranks, of_rank)
    return path


def check(case: Case, path: Path, values: Mapping[str, Tensor]) -> None:
    """Everything is in the files, by two readers."""
    manifest.verify(path)
    stored = {name: StoredTensors(path, name) for name in (MODEL, OPTIMIZER)}
    for name, tensor in values.items():
        file = stored[MODEL if name in case.shapes else OPTIMIZER]
        assert torch.equal(file.whole(name), tensor), name
    stored[MODEL].check(case.shapes)
    found = [load_file(file) for file in path.glob("model*.safetensors")]
    assert sum(map(len, found)) == len(case.shapes)
    assert all(torch.equal(tensor, values[name]) for each in found for name, tensor in each.items())


def load(ranks: Sequence[Any], folder: Path, values: Mapping[str, Tensor]) -> None:
    """Every rank gets its own part of the checkpoint."""
    wanted = [_own(engine) for engine in ranks]
    for engine in ranks:
        for name, tensor in _flats(engine):
            tensor.fill_(torch.nan)
    together(ranks, lambda engine: restore.restore(engine, folder if engine.world.rank == 0 else None, 1))
    for engine, before in zip(ranks, wanted, strict=True):
        for name, tensor in _own(engine).items():
            assert torch.equal(tensor, before[name]), (engine.world.rank, name)


def _flats(engine: Any) -> Iterator[tuple[str, Tensor]]:
    for number, (buffer, state) in enumerate(zip(engine.buffers, engine.optimizer_state(), strict=True)):
        yield f"{number}", buffer.parameters
        yield from ((f"{number}.{key}", flat) for key, flat in state.items())


def _own(engine: Any) -> dict[str, Tensor]:
    """What the rank holds of every tensor, without what lies between them."""
    found = {}
    for buffer, state in zip(engine.buffers, engine.optimizer_state(), strict=True):
        for slot in buffer.slots:
            found[slot.name] = slot.view(buffer.parameters).clone()
            if (own := buffer.own_part(slot.start, slot.stop)) is not None:
                found |= {f"{key}.{slot.name}": flat[own].clone() for key, flat in state.items()}
    return found


def draw(seed: int) -> Case:
    """Shapes, splits, hosts and layout at random: odd sizes, a rank's tensors cut in rows, columns and stacked parts."""
    rng = random.Random(seed)
    tp = rng.choice([1, 2, 3])
    size = tp * rng.choice([1, 2, 3])
    hosts = [f"h{number}" for number in range(rng.choice([1, 2, 3]))]
    by_rank = sorted(rng.choices(hosts, k=size)) if rng.random() < 0.7 else rng.choices(hosts, k=size)
    shapes, splits = {}, {}
    for number in range(rng.randint(2, 7)):
        name = f"w{number}" if rng.random() < 0.7 else f"bias{number}"
        parts = rng.choice([1, 1, 3])
        shape = tuple(rng.randint(tp, 60) for _ in range(1 if "bias" in name else 2))
        dim = rng.randrange(len(shape))
        shapes[name] = (*shape[:dim], parts * shape[dim], *shape[dim + 1 :])
        if rng.random() < 0.7:
            splits[name] = (dim, parts)
    return Case(shapes, splits, tuple(by_rank), tp, rng.random() < 0.6, rng.choice([100, 3000, 30_000]))


def of_pages(case: Case, writes: Sequence[Write]) -> dict[tuple[str, int], set[str]]:
    """The hosts that write each page of each file."""
    found = defaultdict(set)
    for rank, file, start, stop in writes:
        for page in range(start // PAGE, -(-stop // PAGE)):
            found[file, page].add(case.hosts[rank])
    return found


@pytest.mark.parametrize("seed", range(60))
def test_no_two_hosts_write_the_same_page_and_every_byte_is_written_once(
    seed: int, writes: list[Write], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "EXCHANGE_BYTES", 2000)
    case = draw(seed)
    values = values_of(case, seed)
    ranks = engines(case, values)
    path = save(case, ranks, tmp_path)
    assert all(len(hosts) == 1 for hosts in of_pages(case, writes).values())
    for file in path.glob("*.safetensors"):
        places = sorted((start, stop) for _, name, start, stop in writes if name == file.name)
        assert [stop for _, stop in places] == [*(start for start, _ in places[1:]), file.stat().st_size], file
    count = len(set(case.hosts))
    assert len(list(path.glob("*.safetensors"))) == 2 * count
    check(case, path, values)
    load(ranks, path, values)
    # And with other ranks.
    other = Case(case.shapes, case.splits, ("h",) * 2, 2 if seed % 2 else 1, bool(seed % 3), 1000)
    if all(size >= 2 for shape in case.shapes.values() for size in shape):
        load(engines(other, values), path, values)

"""Each byte of a checkpoint is written by one rank, each host writes its own files, and any layout reads them."""

import json
import os
import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from thread_world import make_worlds, on_ranks
from torch import Tensor, nn

from hvd_transformer.checkpoint import exchange, manifest, restore, staging
from hvd_transformer.checkpoint.capture import Capture
from hvd_transformer.checkpoint.crc import Range
from hvd_transformer.checkpoint.layout import Writers
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, CheckpointStore, Snapshot
from hvd_transformer.checkpoint.stored_tensors import StoredTensors
from hvd_transformer.gradients.buffers import WHOLE, ZeroShard, make_grad_buffers
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.tensor_parallel import piece

KEYS = ("exp_avg", "exp_avg_sq")
PAGE = 4096


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
    found = []
    for rank, world in enumerate(make_worlds(size, case.hosts)):
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
            dp_group=world, tp_group=world.group(range(rank - rank % tp, rank - rank % tp + tp)), zero_shard=shard,
        )  # fmt: skip
        found.append(
            SimpleNamespace(
                world=world, mesh=mesh, buffers=buffers, shapes=case.shapes, splits=case.splits if tp > 1 else {},
                optimizer_state=lambda state=state: state, wait_params=lambda: None, set_updates=lambda number: None,
                exchange_weights=lambda: None,
                config=SimpleNamespace(optimizer=SimpleNamespace(name="adamw", momentum=0.0)),
                local_steps=SimpleNamespace(state=[{} for _ in buffers]),
                grad_sync=SimpleNamespace(wire=SimpleNamespace(format="none", tensors=dict)),
            )
        )  # fmt: skip
    return found


def together(ranks: Sequence[Any], action: Any) -> list[Any]:
    """The action of every rank, side by side."""
    results = on_ranks([engine.world for engine in ranks], lambda world: action(ranks[world.rank]))
    failed = [result for result in results if isinstance(result, BaseException)]
    assert not failed, failed
    return results


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
    writings = [staging.Writing() for _ in ranks]
    assert all(staging.enter(staged, rank) for rank in range(1, len(ranks)) if sees[rank])

    def of_rank(engine: Any) -> Path | None:
        rank = current.rank = engine.world.rank
        taken = Capture(engine, writers).take(1, {"data_digest": "d"}, {}, False)
        assert rank not in blind or not taken.parts
        if rank == 0:
            return store.save(taken, staged, writings[rank])
        if sees[rank]:
            store.save_part(taken, staged, rank, writings[rank])
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
        for _, tensor in _flats(engine):
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
    """Shapes, splits, hosts and layout at random: odd sizes, cut in rows, columns and stacked parts."""
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


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_see_no_folder_send_what_they_hold_and_get_what_they_need(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "EXCHANGE_BYTES", 5000)
    monkeypatch.setattr(restore, "SEND_BYTES", 1000)
    case = draw(seed)
    values = values_of(case, seed)
    ranks = engines(case, values)
    blind = [rank for rank, host in enumerate(case.hosts) if host != case.hosts[0]]
    path = save(case, ranks, tmp_path, blind)
    assert {file.name for file in path.glob("*.safetensors")} == {MODEL, OPTIMIZER}
    check(case, path, values)
    horovods = [engine.world.link.horovod for engine in ranks]
    before = [horovod.received for horovod in horovods]
    monkeypatch.setattr("hvd_transformer.checkpoint.shared_folder.seen_by", lambda world, sees: [
        rank not in blind for rank in range(world.size)
    ])  # fmt: skip
    load(ranks, path, values)
    for rank, engine in enumerate(ranks):
        received = horovods[rank].received - before[rank]
        held = sum(tensor.nbytes for _, tensor in _flats(engine))
        if rank == 0:  # it gets what is asked for alone
            assert received < 2000 * (len(case.shapes) + 1) * len(blind) * len(KEYS) + 1
        else:
            assert received <= (held if rank in blind else 0)


BIG = {"input": (3000, 64), "output": (64, 3000), "norm": (64,), "embedding": (1001, 64)}
CUT = {"input": (0, 1), "output": (1, 1), "embedding": (0, 1)}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_that_hold_the_same_write_equal_parts(zero: bool, tp: int, writes: list[Write], tmp_path: Path) -> None:
    case = Case(BIG, CUT, ("h",) * 4, tp, zero)
    values = values_of(case, 1)
    ranks = engines(case, values)
    check(case, save(case, ranks, tmp_path), values)
    sizes = [sum(stop - start for own, _, start, stop in writes if own == rank) for rank in range(4)]
    total = sum(tensor.nbytes for tensor in values.values())
    assert max(sizes) <= 1.02 * total / 4 + 4096


@pytest.mark.parametrize("zero", [False, True])
def test_the_number_of_writes_does_not_grow_with_rows(
    zero: bool, writes: list[Write], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(rows: int) -> int:
        writes.clear()
        case = Case({"output": (rows, 30)}, {"output": (1, 1)}, ("h",) * 4, 2, zero)
        save(case, engines(case, values_of(case, 1)), tmp_path / str(rows))
        return len(writes)

    assert count(400) == count(40)


def test_copies_hold_what_is_written_and_no_more(tmp_path: Path) -> None:
    for zero in (False, True):
        case = Case(BIG, CUT, ("a", "a", "b", "b"), 2, zero)
        ranks = engines(case, values_of(case, 1))
        total = sum(tensor.nbytes for tensor in values_of(case, 1).values())
        taken: list[Snapshot] = together(ranks, lambda engine: Capture(engine).take(1, {}, {}, False))
        sizes = [sum(block.nbytes for part in own.parts.values() for _, block in part.blocks) for own in taken]
        assert sum(sizes) == total and max(sizes) <= 0.6 * total


def test_the_index_of_the_model_is_the_one_of_hugging_face(tmp_path: Path) -> None:
    case = Case(BIG, {}, ("a", "b", "c"))
    values = values_of(case, 1)
    path = save(case, engines(case, values), tmp_path)
    index = json.loads((path / f"{MODEL}.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(values[name].nbytes for name in BIG)}
    assert index.keys() == {"metadata", "weight_map"} and index["weight_map"].keys() == BIG.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(path / file)[name], values[name])
    files = sorted(file.name for file in path.glob("model*.safetensors"))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def test_an_index_that_lies_is_damage(tmp_path: Path) -> None:
    case = Case(BIG, CUT, ("a", "b"), 1, zero=True)
    path = save(case, engines(case, values_of(case, 1)), tmp_path)
    file = path / f"{OPTIMIZER}.index.json"
    index = json.loads(file.read_text())
    for change in ("file", "count", "tensor"):
        broken = json.loads(json.dumps(index))
        part = next(iter(broken["pieces"].values()))["parts"][0]
        part[change] = 5 if change == "count" else "../x" if change == "file" else "other"
        file.write_text(json.dumps(broken))
        with pytest.raises(manifest.DamagedCheckpoint):
            stored = StoredTensors(path, OPTIMIZER)
            for name in broken["pieces"]:
                stored.whole(name)
    file.write_text("{")
    with pytest.raises(manifest.DamagedCheckpoint, match="damaged"):
        StoredTensors(path, OPTIMIZER)


def test_the_manifest_is_made_without_reading_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(BIG, CUT, ("a", "a"))
    opened: list[str] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r", *rest, **more: (
        opened.append(path.name) if "r" in mode else None, real(path, mode, *rest, **more)
    )[1])  # fmt: skip
    path = save(case, engines(case, values_of(case, 1)), tmp_path)
    assert not [name for name in opened if name.endswith(".safetensors")]
    ranges = json.loads((path / manifest.NAME).read_text())["files"][MODEL]["crc32"]
    assert ranges[-1][0] == (path / MODEL).stat().st_size


def test_ranks_verify_different_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte by one of them, and damage anywhere is seen by one."""
    monkeypatch.setattr(manifest, "RANGE_BYTES", 1000)
    monkeypatch.setattr(staging, "RANGE_BYTES", 1000)
    case = Case(BIG, CUT, ("a",) * 5)
    path = save(case, engines(case, values_of(case, 1)), tmp_path)
    read: list[Range] = []
    blocks = manifest._blocks
    monkeypatch.setattr(manifest, "_blocks", lambda file, start, stop, advance: read.append(
        (file.name, start, stop)
    ) or blocks(file, start, stop, advance))  # fmt: skip
    for index in range(3):
        manifest.verify(path, index, 3)
    alone = sorted(read)
    read.clear()
    manifest.verify(path)
    assert sorted(read) == alone
    assert sum(stop - start for _, start, stop in alone) == sum(
        file.stat().st_size for file in path.iterdir() if file.name != manifest.NAME
    )
    for place in (0, 300_000, (path / MODEL).stat().st_size - 1):
        content = bytearray((path / MODEL).read_bytes())
        content[place] ^= 16
        (path / MODEL).write_bytes(content)
        seen = 0
        for index in range(3):
            try:
                manifest.verify(path, index, 3)
            except manifest.DamagedCheckpoint as error:
                assert str(error).startswith(f"{path / MODEL}: damaged: ")
                seen += 1
        assert seen == 1
        content[place] ^= 16
        (path / MODEL).write_bytes(content)

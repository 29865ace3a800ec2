"""Which GPUs a rank computes on, or one line that says why it does not."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from thread_world import make_worlds, on_ranks

from hvd_transformer.comm.world import AgreedError, World
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.parallel import devices
from hvd_transformer.parallel.devices import Sight, first_devices, why_no_gpus
from hvd_transformer.parallel.mesh import ParallelMesh

CPU = torch.device("cpu")
BUILD = "build it with HOROVOD_GPU_OPERATIONS=NCCL make install"


class Gpus:
    """A pretended `torch.cuda`, in which each thread sees the GPUs of its rank. `chosen` are the devices by rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chosen: dict[int, torch.device] = {}
        self.streams: dict[int, list[str]] = {}  # that each rank computes on
        self.own = threading.local()
        self.present = 0  # of each host, for torch or not
        monkeypatch.setattr(devices, "_num_present", lambda: self.present)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(self.own.uuids))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.own.uuids))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=self.own.uuids[i]))
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)

    def see(self, rank: int, uuids: Sequence[str]) -> None:
        """The calling thread is this rank, which sees these GPUs."""
        self.own.rank, self.own.uuids = rank, uuids

    def set_device(self, device: torch.device) -> None:
        self.chosen[self.own.rank] = device

    def set_stream(self, stream: str) -> None:
        self.streams.setdefault(self.own.rank, []).append(stream)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def meshes(gpus: Gpus, seen: Sequence[str], *words: str, hosts: str, deaf: Sequence[int] = ()) -> list[object]:
    """The mesh of each rank, or what it raised. Letters of `seen` are GPUs; ranks in `deaf` cannot send from them."""
    worlds = make_worlds(len(seen), list(hosts))
    for world in worlds:
        world.link.horovod.can_send = world.rank not in deaf

    def of(world: World) -> ParallelMesh:
        gpus.see(world.rank, seen[world.rank])
        return ParallelMesh.of(load(overrides=words), world)

    return on_ranks(worlds, of)


def indices(found: Sequence[object]) -> list[list[int | None]]:
    """The device indices of each rank's stages."""
    for mesh in found:
        assert isinstance(mesh, ParallelMesh), mesh
    return [[device.index for device in mesh.devices] for mesh in found]


def alone(gpus: Gpus, seen: str, *words: str) -> ParallelMesh:
    gpus.see(0, seen)
    return ParallelMesh.of(load(overrides=words), World())


PLACED: Mapping[str, tuple[Sequence[str], str, int, list[list[int]]]] = {  # GPUs, hosts, stages: devices
    "a host's ranks take its GPUs in turn": (["ab", "ab", "cd", "cd"], "hhii", 1, [[0], [1], [0], [1]]),
    "more GPUs than ranks": (["abc", "abc"], "hh", 1, [[0], [1]]),
    "ranks of a host need not be neighbours": (["ab", "cd", "ab", "cd"], "hihi", 1, [[0], [0], [1], [1]]),
    "stages": (["abcd", "abcd", "efgh"], "hhi", 2, [[0, 1], [2, 3], [0, 1]]),
    "one visible GPU per rank": (["a", "b", "c", "d"], "hhii", 1, [[0], [0], [0], [0]]),
    "two visible GPUs per rank, for two stages": (["ab", "cd"], "hh", 2, [[0, 1], [0, 1]]),
    "more visible GPUs of its own than stages": (["ab", "cd"], "hh", 1, [[0], [0]]),
    "the same GPUs, each rank in an order of its own": (["ab", "ba"], "hh", 1, [[0], [0]]),
    "one host by two names": (["ab", "ab"], "hi", 1, [[0], [1]]),
}


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("case", PLACED)
def test_each_stage_has_a_gpu_of_its_own(case: str, device: str, gpus: Gpus) -> None:
    seen, hosts, stages, expected = PLACED[case]
    found = meshes(gpus, seen, f"training.device={device}", f"parallel.pipeline={stages}", hosts=hosts)
    assert indices(found) == expected
    assert all(mesh.warning is None for mesh in found)
    assert gpus.chosen == {rank: torch.device("cuda", own[0]) for rank, own in enumerate(expected)}
    # The device of the last stream that is set becomes the current one.
    assert gpus.streams == {rank: [f"stream of cuda:{i}" for i in own[::-1]] for rank, own in enumerate(expected)}
    used = [seen[rank][index] for rank, own in enumerate(expected) for index in own]
    assert len(set(used)) == len(used)


REFUSED: Mapping[str, tuple[Sequence[str], str, int, Sequence[int], int, str, str]] = {
    # GPUs, hosts, stages, ranks that cannot send: the rank that is to blame, why, what helps
    "one GPU too few": (["ab"] * 3, "hhh", 1, (), 2, "host h has 2 GPUs for 3 ranks", "start at most 2 ranks there"),
    "for the stages": (
        ["abcde"] * 2, "hh", 4, (), 1, "host h has 5 GPUs for 2 ranks × 4 stages", "start at most 1 rank there",
    ),
    "one rank has none": (["ab", "ab", ""], "hhi", 1, (), 2, "host i has 0 GPUs for 1 rank", ""),
    "two ranks, one GPU": (["a", "a"], "hh", 1, (), 1, "host h has 1 GPU for 2 ranks", "start at most 1 rank there"),
    "GPUs that overlap": (
        ["ab", "bc"], "hh", 2, (), 1, "rank 0 on h and rank 1 on h would use the same GPU",
        "let them see the same GPUs in the same order, or different ones",
    ),
    "no NCCL": (["a", "b"], "hi", 1, (0, 1), 0, "Horovod on host h cannot send from a GPU", BUILD),
    "no NCCL on one host": (["a", "b"], "hi", 1, (1,), 1, "Horovod on host i cannot send from a GPU", BUILD),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_cuda_that_cannot_be_is_refused_on_all_ranks_in_one_line(case: str, gpus: Gpus) -> None:
    seen, hosts, stages, deaf, rank, why, cure = REFUSED[case]
    words = "training.device=cuda", f"parallel.pipeline={stages}"
    for error in meshes(gpus, seen, *words, hosts=hosts, deaf=deaf):
        assert isinstance(error, AgreedError) and error.rank == rank
        cures = f"{cure}, or set training.device=cpu" if cure else "set training.device=cpu"
        assert str(error) == f"training.device=cuda: {why}; {cures}"
    assert gpus.chosen == {}


@pytest.mark.parametrize("case", REFUSED)
def test_auto_says_why_it_is_the_cpu_although_there_are_gpus(case: str, gpus: Gpus) -> None:
    seen, hosts, stages, deaf, _, why, cure = REFUSED[case]
    told = f"training.device=auto: all ranks compute on the CPU although there are GPUs: {why}"
    for mesh in meshes(gpus, seen, f"parallel.pipeline={stages}", hosts=hosts, deaf=deaf):
        assert mesh.devices == (CPU,) * stages
        assert mesh.warning == (f"{told}; {cure}" if cure else told)
    assert gpus.chosen == {}


def test_where_no_rank_sees_a_gpu_auto_is_the_cpu_and_cuda_is_refused(gpus: Gpus) -> None:
    for mesh in meshes(gpus, ["", ""], hosts="hh"):
        assert mesh.devices == (CPU,) and mesh.warning is None
    for error in meshes(gpus, ["", ""], "training.device=cuda", hosts="hh"):
        assert str(error) == "training.device=cuda: host h has 0 GPUs for 2 ranks; set training.device=cpu"


def test_gpus_that_torch_cannot_use_are_told(gpus: Gpus) -> None:
    """As with a torch for CPUs, or one that is too new for the driver."""
    gpus.present = 8
    why = "torch on host h cannot use its 8 GPUs; see `python -c 'import torch; torch.cuda.init()'` there"
    for mesh in meshes(gpus, ["", ""], hosts="hh"):
        assert mesh.devices == (CPU,)
        assert mesh.warning == f"training.device=auto: all ranks compute on the CPU although there are GPUs: {why}"
    for error in meshes(gpus, ["", ""], "training.device=cuda", hosts="hh"):
        assert str(error) == f"training.device=cuda: {why}, or set training.device=cpu"
    for mesh in meshes(gpus, ["a", "b"], hosts="hh"):
        assert mesh.devices == (torch.device("cuda", 0),) and mesh.warning is None


@pytest.mark.parametrize(("visible", "number"), [(None, 2), ("0", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0)])
def test_gpus_that_are_hidden_on_purpose_are_not(
    visible: str | None, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices._num_present(tmp_path) == number


def test_the_cpu_that_is_asked_for_needs_no_gpu_and_no_message(gpus: Gpus) -> None:
    worlds = make_worlds(2)
    gpus.see(0, "ab")
    mesh = ParallelMesh.of(load(overrides=["training.device=cpu"]), worlds[0])  # the other rank never comes
    assert mesh.devices == (CPU,) and mesh.warning is None


def test_a_world_of_one_needs_no_horovod(gpus: Gpus) -> None:
    assert alone(gpus, "ab").devices == (torch.device("cuda", 0),)
    both = (torch.device("cuda", 0), torch.device("cuda", 1))
    assert alone(gpus, "ab", "training.device=cuda", "parallel.pipeline=2").devices == both
    assert alone(gpus, "").devices == (CPU,)
    lacking = alone(gpus, "a", "parallel.pipeline=2")
    assert lacking.devices == (CPU, CPU) and "has 1 GPU for 1 rank × 2 stages" in str(lacking.warning)
    with pytest.raises(UserError, match="has 0 GPUs for 1 rank; set training.device=cpu"):
        alone(gpus, "", "training.device=cuda")


def test_devices_that_were_chosen_before_are_kept(gpus: Gpus) -> None:
    gpus.see(0, "abc")
    mesh = ParallelMesh.of(load(), World(), [torch.device("cuda", 2)])
    assert mesh.devices == (torch.device("cuda", 2),) and gpus.chosen == {0: torch.device("cuda", 2)}


@pytest.mark.parametrize(
    ("nccl", "cuda", "rocm", "mpi", "sends"),
    [
        (22005, True, False, False, True),
        (0, False, False, True, False),
        (0, True, False, True, True),  # HOROVOD_GPU_OPERATIONS=MPI
        (0, False, True, True, True),
        (0, True, False, False, False),  # which gloo cannot use
    ],
)
def test_horovod_sends_from_gpus_with_nccl_or_an_mpi_that_knows_cuda(
    nccl: int, cuda: bool, rocm: bool, mpi: bool, sends: bool
) -> None:
    world = World()
    assert not world.sends_from_gpus
    found = {"nccl_built": nccl, "cuda_built": cuda, "rocm_built": rocm, "mpi_enabled": mpi}
    world.link.horovod = SimpleNamespace(**{name: lambda value=value: value for name, value in found.items()})
    assert world.sends_from_gpus is sends


def test_thousands_of_ranks_are_placed_at_once() -> None:
    sights = [Sight(True, tuple(range(first, first + 8))) for first in range(0, 4096, 8) for _ in range(8)]
    assert why_no_gpus(sights, 1, ["h"] * 4096) is None
    assert first_devices(sights, 1) == [*range(8)] * 512

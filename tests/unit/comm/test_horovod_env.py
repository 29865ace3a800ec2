"""The launchers' variables give this process's place; unset Horovod variables get defaults."""

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from hvd_transformer.comm.horovod_env import (
    Launched,
    cannot_join,
    cycle_milliseconds,
    launched,
    set_defaults,
    usable_cores,
)
from hvd_transformer.launch.node import probe


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no launcher had started this process."""
    for name in os.environ:
        if name.startswith(("HOROVOD_", "OMPI_", "PMI_", "MPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


LAUNCHERS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
}


def test_alone_is_a_world_of_one() -> None:
    assert launched() == Launched(rank=0, size=1, local_size=1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_is_understood(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHERS[launcher], ("5", "8", "4"), strict=True):
        monkeypatch.setenv(name, value)
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launched() == Launched(rank=5, size=8, local_size=4, launcher=launcher)


@pytest.mark.parametrize("launcher", list(LAUNCHERS)[:4])
def test_without_the_local_size_all_ranks_may_be_here(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHERS[launcher][:2], ("1", "3"), strict=True):
        monkeypatch.setenv(name, value)
    assert launched() == Launched(rank=1, size=3, local_size=3, launcher=launcher)


@pytest.mark.parametrize(("per_node", "most"), [("4", 4), ("4(x2)", 4), ("2(x12),13", 13), ("16(x2),3", 16)])
def test_slurm_counts_tasks_by_node(per_node: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHERS["srun"], ("1", "32", per_node), strict=True):
        monkeypatch.setenv(name, value)
    assert launched().local_size == most


def test_a_batch_script_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs once, and has the variables of its whole job."""
    for name, value in [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_LOCALID", "0")]:
        monkeypatch.setenv(name, value)
    assert launched() == Launched(0, 1, 1)


def test_who_cannot_join_the_others_is_told_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cannot_join(Launched(0, 8, 4, "mpirun")) is None
    assert "use hvd-transformer launch -np 8 or horovodrun -np 8" in str(cannot_join(Launched(1, 8, 4, "torchrun")))
    assert "use srun --mpi=pmix, or hvd-transformer launch" in str(cannot_join(Launched(1, 8, 4, "srun")))
    monkeypatch.setenv("PMIX_RANK", "1")
    assert cannot_join(Launched(1, 8, 4, "srun")) is None


@pytest.mark.parametrize("name", ["HOROVOD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK"])
def test_half_a_family_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    assert launched().size == 1


def test_horovodruns_own_word_counts_before_the_mpi_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """horovodrun started inside an MPI or Slurm allocation."""
    for name, value in [("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("HOROVOD_RANK", "2"), ("HOROVOD_SIZE", "4")]:
        monkeypatch.setenv(name, value)
    assert launched()[:2] == (2, 4)


def test_autotune_is_left_what_it_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "HOROVOD_AUTOTUNE": "1"})
    set_defaults(local_size=1)
    assert not {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"} & os.environ.keys()
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" in os.environ


def test_defaults_are_set_and_the_users_own_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "42")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_defaults(local_size=1)
    assert os.environ["HOROVOD_CYCLE_TIME"] == "42"
    assert os.environ["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert int(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]) > 30
    assert int(os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]) > 0


@pytest.mark.parametrize("stall_seconds", [None, 20.0, 3600.0])
def test_gloo_waits_longer_than_a_rank_may_be_silent_and_horovod_longer_still(
    stall_seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    set_defaults(local_size=1, stall_seconds=stall_seconds)
    gloo, horovod = (int(os.environ[f"HOROVOD_{name}_SECONDS"]) for name in ("GLOO_TIMEOUT", "STALL_SHUTDOWN_TIME"))
    assert (stall_seconds or 0) < gloo <= horovod


CYCLES = {  # Horovod's version, the backend, whether layers wait: milliseconds
    ("0.28.1+wakeup", "gloo", False): "100",
    ("0.28.1+wakeup", "mpi", False): "100",
    ("0.28.1+wakeup", "gloo", True): "100",
    ("0.28.1", "gloo", False): "10",
    ("0.28.1", "mpi", False): "2",
    ("0.28.1", "gloo", True): "0.5",
    (None, "gloo", False): "10",
}


@pytest.mark.parametrize("case", CYCLES)
def test_the_cycle_is_long_only_where_horovod_wakes_up(
    case: tuple[str | None, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, backend, prompt = case

    def version(package: str) -> str:
        assert package == "horovod"
        if installed is None:
            raise PackageNotFoundError
        return installed

    monkeypatch.setattr("hvd_transformer.comm.horovod_env.version", version)
    monkeypatch.setattr(os, "environ", {"HOROVOD_CONTROLLER": backend})
    set_defaults(local_size=1, prompt=prompt)
    assert os.environ["HOROVOD_CYCLE_TIME"] == CYCLES[case]


@pytest.mark.parametrize(
    ("ranks", "gloo", "mpi", "prompt", "gpu"),
    [(1, 10, 2, 0.5, 1), (2, 10, 2, 0.5, 1), (8, 10, 2, 0.5, 1), (64, 10, 2, 1.28, 1.28), (1024, *[20.48] * 4)],
)
def test_published_horovods_cycle_leaves_rank_0_time(
    ranks: int, gloo: float, mpi: float, prompt: float, gpu: float
) -> None:
    def cycle(**given: bool) -> float:
        options = dict.fromkeys(("gloo", "prompt", "on_gpu", "wakes_up"), False)
        return cycle_milliseconds(ranks, **{**options, **given})

    found = cycle(gloo=True), cycle(), cycle(gloo=True, prompt=True), cycle(gloo=True, on_gpu=True)
    assert found == pytest.approx((gloo, mpi, prompt, gpu))
    assert cycle(wakes_up=True) == cycle(wakes_up=True, on_gpu=True, prompt=True) == 100


def test_the_cycle_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_transformer.comm.horovod_env.version", lambda _: "0.28.1")
    for options, expected in [({"on_gpu": True}, "1"), ({"size": 1024}, "20.48"), ({}, "2")]:
        monkeypatch.setattr(os, "environ", {})
        set_defaults(local_size=1, **options)
        assert os.environ["HOROVOD_CYCLE_TIME"] == expected


def test_mpi_yields_only_where_ranks_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, cores, yields in [(2, 2, True), (4, 2, True), (2, 16, False)]:
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr("hvd_transformer.comm.horovod_env.usable_cores", lambda cores=cores: cores)
        set_defaults(local_size=ranks)
        assert ("OMPI_MCA_mpi_yield_when_idle" in os.environ) == yields


def test_usable_cores_are_those_this_process_may_run_on() -> None:
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, cores)
    assert usable_cores(Path("/nowhere")) == len(cores)


QUOTAS = {
    "no limit": ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
    "no groups": ("", {}, 8),
    "a container": ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    "a part of a core": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    "more than two": ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
    "more than there are": ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
    "a group around it": ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
    "the smallest": ("0::/a/b\n", {"a/cpu.max": "600000 100000\n", "a/b/cpu.max": "500000 100000\n"}, 5),
    "not below the mount": ("0::/../a\n", {"a/cpu.max": "200000 100000\n"}, 8),
    "version 1": ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    "version 1, without a link": (
        "4:cpu,cpuacct:/job\n",
        {f"cpu,cpuacct/job/cpu.cfs_{name}_us": f"{time}\n" for name, time in (("quota", 300000), ("period", 100000))},
        3,
    ),
    "version 1, in another order": (
        "4:cpuacct,cpu:/\n",
        {f"cpu,cpuacct/cpu.cfs_{name}_us": f"{time}\n" for name, time in (("quota", 400000), ("period", 100000))},
        4,
    ),
    "version 1, other controllers": (
        "4:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "200000\n", "cpuset/cpu.cfs_period_us": "100000\n"}, 8
    ),
    "version 1, no limit": ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    "version 1, inside": (
        "4:cpu:/job\n0::/other\n", {"cpu/job/cpu.cfs_quota_us": "70000\n", "cpu/job/cpu.cfs_period_us": "10000\n"}, 7
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTAS)
def test_usable_cores_are_those_that_a_cpu_limit_leaves(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's, for example: torch would start a thread for each core of its host. The doctor's are the same."""
    groups, files, cores = QUOTAS[case]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(tmp_path) == probe._cores(tmp_path) == cores


def test_collectives_on_gpus_end_on_a_stream_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HOROVOD_ENABLE_ASYNC_COMPLETION"
    for own, on_gpu, found in [({}, False, None), ({}, True, "1"), ({name: "0"}, True, "0")]:
        monkeypatch.setattr(os, "environ", dict(own))
        set_defaults(local_size=1, on_gpu=on_gpu)
        assert os.environ.get(name) == found

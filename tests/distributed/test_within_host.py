"""Ranks of one host exchange tensors through memory that they share (docker/patches/within_host.patch)."""

import json
import re
from pathlib import Path

import pytest
from conftest import BIN

from hvd_transformer.comm.horovod_env import horovod_wakes_up

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not horovod_wakes_up(), reason="needs the Horovod of docker/build_horovod.sh"),
]
WORKER = Path(__file__).parent / "workers" / "within_host.py"


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        (2, "gloo"),
        (3, "gloo"),
        (2, "mpi"),
        pytest.param(4, "gloo", marks=pytest.mark.slow),
        pytest.param(3, "mpi", marks=pytest.mark.slow),
    ],
)
def test_collectives_have_torchs_results(world, size, backend):
    for done in world(size, backend).call("within_host:everything"):
        of_others = (size - 1) * (1_000_100 * 8 // size)  # of int64, the last type: the others are free
        assert done == {"checks": 150, "of_others": of_others, "sharing": True, "left": []}


def test_training_sums_gradients_where_they_are(world):
    (done, others), (plain, _) = (world(2, "gloo").call("shared_gradients:trained", shares) for shares in (True, False))
    assert done == others
    assert (done["files"], done["buffers"] > 1) == (2, True)  # one of each rank, however many buffers there are
    assert done["of_others"] == done["gradients"] // 2 > 100_000  # of the other rank's, half
    assert plain["losses"] == done["losses"]


def results(output: str) -> list[dict[str, object]]:
    """Of all ranks, from the launcher's screen, where mpirun may put its own marks behind them."""
    decode = json.JSONDecoder().raw_decode
    return [decode(output, found.start())[0] for found in re.finditer(re.escape('{"rank"'), output)]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_process_sets_have_memory_of_their_own(ranks, backend):
    done = ranks(4, [BIN / "python", WORKER], backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one["sharing"] for one in results(done.stdout)] == [True] * 4
    assert all(one["left"] == [] for one in results(done.stdout))
    assert all(one["of_others"] for one in results(done.stdout))


def test_where_one_rank_shares_none_all_go_on_over_gloo(ranks):
    done = ranks(2, [BIN / "python", WORKER, "1"], "gloo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(one["sharing"], one["of_others"]) for one in results(done.stdout)] == [(False, 0)] * 2

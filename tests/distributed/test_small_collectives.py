"""No collective is lost or hangs: many small ones at once, also in process sets and after a second init. Threads sleep
while there are none."""

import os
from pathlib import Path

import pytest
from conftest import BIN

from hvd_transformer.comm.horovod_env import horovod_wakes_up

pytestmark = pytest.mark.distributed
WORKERS = Path(__file__).parent / "workers"
# 100000 and --timeout 3600 for a long run.
COUNT = int(os.environ.get("COLLECTIVES", "1200"))


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_small_collectives_from_several_threads_in_any_order(ranks, backend):
    result = ranks(4, [BIN / "python", WORKERS / "small_collectives.py", COUNT], backend, timeout=240 + COUNT / 20)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "done in" in result.stdout


@pytest.mark.skipif(not horovod_wakes_up(), reason="needs the Horovod of docker/build_horovod.sh")
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_threads_sleep_while_there_is_nothing_to_do(world, backend):
    for counts in world(2, backend).call("idle_threads:wake_ups"):
        assert counts and max(counts) < 50, counts  # published gloo's wake 100 times a second

"""No collective is lost or hangs: many small ones at once, also in process sets and after a second init."""

import os
from pathlib import Path

import pytest
from conftest import BIN

pytestmark = pytest.mark.distributed
WORKERS = Path(__file__).parent / "workers"
# 100000 and --timeout 3600 for a long run.
COUNT = int(os.environ.get("COLLECTIVES", "1200"))


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_small_collectives_from_several_threads_in_any_order(ranks, backend):
    result = ranks(4, [BIN / "python", WORKERS / "small_collectives.py", COUNT], backend, timeout=240 + COUNT / 20)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "done in" in result.stdout

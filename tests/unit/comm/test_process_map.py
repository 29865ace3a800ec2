"""The process map: order, bounded read-ahead, errors, and no process left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from waiting import is_running, wait_until

from hvd_transformer.comm.process_map import FEW_ITEMS, _LazyMap, mpi_size, process_map, worker_map
from hvd_transformer.errors import UserError


def square(number: int) -> int:
    time.sleep(0.01 * (number % 3))
    return number * number


def refuse_three(number: int) -> int:
    if number == 3:
        raise UserError("three is wrong")
    return number


def process_id(_: int) -> int:
    time.sleep(0.02)
    return os.getpid()


def test_one_process_is_the_builtin_map():
    with process_map(1) as mapped:
        assert mapped is map


def test_several_processes():
    count = 40
    with process_map(2) as mapped:
        # In the order of the items.
        assert list(mapped(square, range(count))) == [number * number for number in range(count)]
        # In other processes, the same ones as before.
        processes = set(mapped(process_id, range(count)))
        assert len(processes) == 2
        assert os.getpid() not in processes
        # The map reads at most two items per process ahead.
        taken = []
        results = mapped(square, (taken.append(number) or number for number in range(count)))
        for done in range(1, count + 1):
            next(results)
            assert len(taken) <= max(done + 4, FEW_ITEMS + 1)
        # An error arrives as it was raised.
        with pytest.raises(UserError, match="^three is wrong$"):
            list(mapped(refuse_three, range(count)))


def test_few_items_start_no_processes():
    with process_map(3) as mapped:
        assert set(mapped(process_id, range(FEW_ITEMS))) == {os.getpid()}


def test_processes_end_with_a_killed_parent(tmp_path):
    (tmp_path / "worker_module.py").write_text("import os\ndef number(_): return os.getpid()\n")
    (tmp_path / "script.py").write_text(
        "import time\n"
        "from hvd_transformer.comm.process_map import process_map\n"
        "from worker_module import number\n"
        "if __name__ == '__main__':\n"
        "    with process_map(2) as mapped:\n"
        "        print(*set(mapped(number, range(50))), flush=True)\n"
        "        time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert workers
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, workers)), 10)


def test_without_mpi_worker_map_is_local(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert mpi_size() == 1
    with worker_map(1) as mapped:
        assert mapped is map


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_mpi_size_is_the_launchers(monkeypatch, name):
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, "3")
    assert mpi_size() == 3


def test_threads():
    count = 20
    with process_map(2) as mapped:
        assert isinstance(mapped, _LazyMap)
        # In this process, in the order of the items, two at a time.
        assert list(mapped.in_threads(square, range(count))) == [number * number for number in range(count)]
        assert set(mapped.in_threads(process_id, range(count))) == {os.getpid()}
        both = threading.Barrier(2, timeout=10)
        assert len(list(mapped.in_threads(lambda _: both.wait(), range(2)))) == 2
        assert mapped.mapped is None
        with pytest.raises(UserError, match="^three is wrong$"):
            list(mapped.in_threads(refuse_three, range(count)))

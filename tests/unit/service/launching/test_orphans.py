"""When no rank of a killed launcher can be alive: time enough has passed, and no lock is renewed."""

import json
from pathlib import Path

import pytest

from hvd_transformer.folder_lock import LEFT_OVER_SECONDS, FolderLock
from hvd_transformer.service.launching.orphans import Orphans


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("num_hosts", "launch", "seconds"),
    [
        (1, [], 22.0),  # one and a half times the silence of 8 s, and ten more
        (64, ["--restarts", "3"], 22.0),
        (128, [], 34.0),
        (1000, [], 40.0),
        (1, ["--silence-timeout", "3"], LEFT_OVER_SECONDS),
        (1, ["--silence-timeout", "1m", "--gloo"], 100.0),
        (1, ["--silence-timeout=40s"], 70.0),
        (1, ["--silence-timeout"], 22.0),
    ],
)
def test_ranks_know_that_they_are_cut_off_after_a_while(
    tmp_path: Path, num_hosts: int, launch: list[str], seconds: float
) -> None:
    clock = Clock()
    orphans = Orphans(tmp_path, num_hosts, launch, clock)
    clock.now += seconds - 0.1
    assert orphans.may_live()
    clock.now += 0.2
    assert not orphans.may_live()


@pytest.mark.parametrize("name", [".lock", ".launcher"])
def test_a_lock_that_is_renewed_is_held(tmp_path: Path, name: str) -> None:
    """By a rank on another host, or by a launcher that a user has started since."""
    clock = Clock()
    lock = FolderLock(tmp_path / name, "hvd-train")
    lock.take()
    owner = json.loads((tmp_path / name).read_bytes())
    lock.release()
    orphans = Orphans(tmp_path, 1, [], clock)
    for renewals in range(20):
        owner |= {"host": "h9", "processes": "another kernel", "renewals": f"{renewals:012}"}
        (tmp_path / name).write_text(json.dumps(owner))
        assert orphans.may_live()
        clock.now += 4.0
    clock.now += LEFT_OVER_SECONDS - 4.1
    assert orphans.may_live()
    clock.now += 0.2
    assert not orphans.may_live()


def test_a_lock_of_this_machine_is_held_as_long_as_its_process_lives(tmp_path: Path) -> None:
    """Renewed or not, as by a process that is stopped."""
    clock, path = Clock(), tmp_path / ".lock"
    lock = FolderLock(path, "hvd-train")
    lock.take()
    owner = json.loads(path.read_bytes())
    lock.release()
    path.write_text(json.dumps(owner))
    orphans = Orphans(tmp_path, 1, [], clock)
    clock.now += 1000.0
    assert orphans.may_live()
    path.write_text(json.dumps({**owner, "pid": 1 << 30}))
    assert not orphans.may_live()

"""The hosts that a command line selects, and the fewest ranks that it accepts."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from waiting import is_running, wait_until

from hvd_transformer.cli.launch import launch
from hvd_transformer.errors import UserError
from hvd_transformer.launch import host_pool
from hvd_transformer.launch.host_pool import HostPool, find_hosts, from_script, resolve_min_ranks
from hvd_transformer.launch.hostfile import Host


def test_the_hosts_are_those_given_or_this_one(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=4\n")
    (tmp_path / "script").write_text("#!/bin/sh\necho h3:$SLOTS\n")
    (tmp_path / "script").chmod(0o755)
    assert find_hosts(None, None, None, None, {})() == [Host("localhost", 1)]
    assert find_hosts(3, None, None, None, {})() == [Host("localhost", 3)]
    assert find_hosts(3, "h1:2,h2:4", None, None, {})() == [Host("h1", 2), Host("h2", 4)]
    assert find_hosts(None, None, tmp_path / "hosts", None, {})() == [Host("h1", 2), Host("h2", 4)]
    assert find_hosts(9, None, None, tmp_path / "script", {"SLOTS": "5"})() == [Host("h3", 5)]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="-H and --hostfile: give only one of them"):
        find_hosts(None, "h1:2", tmp_path / "hosts", None, {})
    with pytest.raises(UserError, match="-H, --hostfile and --host-discovery-script: give only one of them"):
        find_hosts(None, "h1:2", None, tmp_path / "script", {})
    with pytest.raises(UserError, match="-np 7: the hosts have 6 slots"):
        find_hosts(7, "h1:2,h2:4", None, None, {})
    with pytest.raises(UserError, match="no such file"):
        find_hosts(None, None, None, tmp_path / "script", {})


@pytest.mark.parametrize(
    ("min_ranks", "num_ranks", "slots", "least"),
    [(None, None, 4, 4), (None, 3, 4, 3), (2, None, 4, 2), (2, 8, 4, 2), (4, 4, 4, 4)],
)
def test_the_least_number_of_ranks(min_ranks: int | None, num_ranks: int | None, slots: int, least: int) -> None:
    assert resolve_min_ranks(min_ranks, num_ranks, slots) == least


@pytest.mark.parametrize(
    ("min_ranks", "num_ranks", "slots", "message"),
    [
        (0, 4, 4, "--min-np 0: must be from 1 to the number of ranks, 4"),
        (5, 4, 8, "--min-np 5: must be from 1 to the number of ranks, 4"),
        (5, None, 4, "--min-np 5: must be from 1 to the number of ranks, 4"),
        (5, 8, 4, "the hosts have 4 slots now, but 5 are needed"),
        (None, 8, 4, "the hosts have 4 slots now, but 8 are needed"),
        (None, None, 0, "the hosts have 0 slots now, but 1 are needed"),
    ],
)
def test_a_least_number_that_cannot_be(min_ranks: int | None, num_ranks: int | None, slots: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_min_ranks(min_ranks, num_ranks, slots)
    assert str(caught.value) == message


def test_ranks_that_share_matrices_are_whole_groups() -> None:
    find = find_hosts(None, "h1:3,h2:2", None, None, {})
    assert HostPool(find, None, tensor=2).hosts() == [Host("h1", 3), Host("h2", 1)]
    assert HostPool(find, 3, tensor=3).hosts() == [Host("h1", 3)]
    assert HostPool(find_hosts(None, "h1:1", None, None, {}), 4, tensor=2).hosts() == []  # too few are left
    with pytest.raises(UserError, match="-np 3: must be a multiple of parallel.tensor=2"):
        HostPool(find, 3, tensor=2)
    assert find_hosts(None, None, None, None, {}, tensor=2)() == [Host("localhost", 2)]
    assert resolve_min_ranks(None, None, 4, tensor=2) == 4
    with pytest.raises(UserError, match="now have fewer slots than the parallel.tensor=2 ranks of one replica"):
        resolve_min_ranks(None, None, 0, tensor=2)


def test_a_host_is_never_excluded_for_more_than_ten_minutes_or_so() -> None:
    pool = HostPool(lambda: [Host("h1", 2)], None)
    assert [pool.cool_down("h1") for _ in range(10)] == [10, 20, 40, 80, 160, 320, 640, 640, 640, 640]


def script(folder: Path, text: str) -> Path:
    file = folder / "script"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_the_discovery_script_has_the_environment_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what no rank gets, such as the token that it needs for its question."""
    monkeypatch.setenv("MY_SLOTS", "3")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    file = script(tmp_path, '[ -z "$PYTHONSAFEPATH" ] && echo localhost:$MY_SLOTS')
    words = ["--host-discovery-script", str(file), "--gloo", "--dry-run", "--", "training.device=cpu"]
    done = CliRunner().invoke(launch, words, catch_exceptions=False)
    assert " -np 3 -H localhost:3 " in done.output


@pytest.mark.parametrize("starts", ["sleep 60", "setsid sleep 60"])
def test_what_a_discovery_script_starts_goes_on_and_keeps_nobody_waiting(tmp_path: Path, starts: str) -> None:
    """It has the script's output; the script may have started it on purpose, for its next calls."""
    child = tmp_path / "child"
    file = script(tmp_path, f"{starts} & echo $! >{child}; echo h1:2; echo noted >&2")
    began = time.monotonic()
    try:
        assert from_script(file, {"PATH": "/usr/bin:/bin"})() == [Host("h1", 2)]
        assert time.monotonic() - began < 10
        time.sleep(0.3)
        assert is_running(int(child.read_text()))
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(child.read_text()), signal.SIGKILL)


def test_a_discovery_script_that_takes_too_long_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "_SCRIPT_SECONDS", 3.0)
    child = tmp_path / "child"
    file = script(tmp_path, f"sleep 60 & echo $! >{child}; wait")
    with pytest.raises(UserError, match="did not end within 3 seconds"):
        from_script(file, {"PATH": "/usr/bin:/bin"})()
    wait_until(lambda: not is_running(int(child.read_text())))


def test_a_discovery_script_may_print_much(tmp_path: Path) -> None:
    file = script(tmp_path, "for at in $(seq 9000); do echo a-long-name-of-a-host-$at:2; done; seq 50000 >&2")
    found = from_script(file, {"PATH": "/usr/bin:/bin"})()
    assert (len(found), found[-1]) == (9000, Host("a-long-name-of-a-host-9000", 2))

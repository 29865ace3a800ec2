"""Losses above the uncompressed one: the mean of ratios by seed, and which of them a contestant of slow_link has."""

import json
from pathlib import Path

import pytest

from benchmarks.compressed_loss import OURS, PEERS, changes, read_losses
from benchmarks.paired import Options, Result
from benchmarks.slow_link import loss_changes

LOSSES = {
    "ours, none": {"1": 2.0, "2": 4.0},
    "ours, int4": {"1": 2.02, "2": 4.12},
    "DDP, PowerSGD 4": {"2": 4.4, "3": 9.0},
    "DDP": {"3": 1.0},
}


def test_seeds_are_compared_with_the_same_seed() -> None:
    found = changes(LOSSES)
    assert found == pytest.approx({"ours, none": 0.0, "ours, int4": 2.0, "DDP, PowerSGD 4": 10.0})


def test_losses_after_other_steps_are_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    assert read_losses(file) == {}
    file.write_text(json.dumps({"steps": 500, "losses": LOSSES}))
    assert read_losses(file, 500) == read_losses(file) == LOSSES
    assert read_losses(file, 400) == {}


def test_auto_has_the_loss_of_what_it_chose_and_a_peer_that_of_its_hook(tmp_path: Path) -> None:
    (tmp_path / "losses.json").write_text(json.dumps({"steps": 500, "losses": LOSSES}))
    notes = {f"ours, {name}": "int4" if name == "auto" else name for name in ("auto", *_formats())}
    found = loss_changes(Result(Options(), {}, {}, {}, {}, notes), tmp_path / "losses.json")
    assert found["ours, auto"] == found["ours, int4"] == pytest.approx(2.0)
    assert found["DDP, 25 MB, plain modules, PowerSGD 4"] == pytest.approx(10.0)
    assert "ours, int8" not in found


def test_every_contestant_has_one_name() -> None:
    assert not OURS.keys() & PEERS.keys()


def _formats() -> list[str]:
    return [name.removeprefix("ours, ") for name in OURS if "local" not in name]

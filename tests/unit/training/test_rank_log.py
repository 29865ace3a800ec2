"""The log of a rank on a disk that is full."""

import logging
from pathlib import Path

import pytest

from hvd_transformer.training.train_job import _log_to


def test_a_full_disk_is_not_told_at_each_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("hvd_transformer")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(log, name, getattr(log, name))
    _log_to(Path("/dev/full"))
    log.info("step 1")
    log.info("a mistake of ours: %d", "text")
    said = capfd.readouterr().err
    assert "No space left" not in said
    assert "a mistake of ours" in said
    log.handlers[0].stream = None  # whose rest nobody can write

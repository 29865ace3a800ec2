"""Ranks and steps of the last start, from the log of rank 0."""

from pathlib import Path

import pytest

from hvd_transformer.service.runs.start_log import StartFacts, read_start

RANKS = "2026-11-24 20:34:05,187 INFO rank 0 of {} (gloo) on h1, cpu\n"
STEP = "2026-11-24 20:34:05,253 INFO epoch 1, step {} of {}, lr 5.000e-03, 54.5 ms a step, loss 8.3\n"


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", StartFacts()),
        (RANKS.format(4), StartFacts(4, None)),
        (RANKS.format(4) + STEP.format(1, 50), StartFacts(4, 50)),
        (RANKS.format(4) + STEP.format(1, 50) + RANKS.format(8) + STEP.format(2, 90), StartFacts(8, 90)),
        (RANKS.format(4) + STEP.format(1, 50) + "noise\n" * 50_000 + STEP.format(2, 60), StartFacts(4, 60)),
        (RANKS.format(4) + STEP.format(1, 50) + "noise\n" * 50_000, StartFacts(4, 50)),
        (f"rank 0 of {'9' * 5000} (x)", StartFacts()),
    ],
)
def test_the_last_start_counts(tmp_path: Path, text: str, facts: StartFacts) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-000.log").write_text(text)
    assert read_start(tmp_path) == facts


def test_without_a_log_nothing_is_known(tmp_path: Path) -> None:
    assert read_start(tmp_path) == StartFacts()

"""Time to a loss: what a run's log says, and nanoGPT's setting."""

from pathlib import Path

import pytest
import torch

from benchmarks.nanogpt import NanoGPT, rate_at, read, validation_loss
from benchmarks.time_to_loss import Evaluated, parse_run, seconds_to

# A step takes 1 s and the first one 2 s; evaluations take 30 s and 40 s, a checkpoint before step 3 takes 5 s.
LOG = """\
2026-11-25 09:00:00,000 INFO rank 0 of 2 (gloo) on h1, cpu
2026-11-25 09:00:12,500 INFO epoch 1, step 1 of 4, lr 1.000e-03, 2000.0 ms a step, loss 4.00000, gradient norm 1.0000
2026-11-25 09:00:13,500 INFO epoch 1, step 2 of 4, lr 1.000e-03, 1000.0 ms a step, loss 3.00000, gradient norm 1.0000
2026-11-25 09:00:43,500 INFO step 2: valid {'loss': 3.5, 'perplexity': 33.1}, 30.0 s
2026-11-25 09:00:48,500 INFO step 2: checkpoint: training waited 5.0000 s, 0.1000 s of it for the copy
2026-11-25 09:00:50,500 INFO epoch 1, step 4 of 4, lr 1.000e-03, 1000.0 ms a step, loss 2.00000, gradient norm 1.0000
2026-11-25 09:01:30,500 INFO step 4: valid {'loss': 2.5, 'perplexity': 12.2}, 40.0 s
"""


def test_evaluation_and_start_up_are_left_out_and_checkpoints_are_not() -> None:
    assert parse_run(LOG, {2: 3.5, 4: 2.5}) == [Evaluated(2, 3.0, 3.5), Evaluated(4, 10.0, 2.5)]


def test_the_first_evaluation_at_the_goal_counts() -> None:
    run = [Evaluated(10, 1.0, 3.0), Evaluated(20, 2.0, 2.0), Evaluated(30, 3.0, 1.5), Evaluated(40, 4.0, 1.8)]
    assert [seconds_to(goal, run) for goal in (2.5, 2.0, 1.9, 1.4)] == [2.0, 2.0, 3.0, None]


def test_nanogpt_has_its_size_and_rates() -> None:
    # Blocks of 4 × 128 × 128 + 8 × 128 × 128 weights and two norms, 65 + 64 embeddings of 128, a final norm.
    assert sum(weight.numel() for weight in NanoGPT(65).parameters()) == 4 * (12 * 128**2 + 2 * 128) + 129 * 128 + 128
    assert rate_at(99) == pytest.approx(1e-3 * 100 / 101)
    assert [rate_at(step) for step in (100, 1050)] == pytest.approx([1e-3, 5.5e-4])
    assert rate_at(1999) == pytest.approx(1e-4, rel=1e-4)


def test_every_token_but_the_first_is_a_target_once(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefghi\n" * 300)
    train, valid, size = read(tmp_path / "text")
    assert (len(train), len(valid), size) == (2700, 300, 10)
    torch.manual_seed(1)
    model = NanoGPT(size)
    losses = []
    for start in range(0, len(valid) - 1, 64):
        window = valid[None, start : start + 65]
        losses += [torch.nn.functional.cross_entropy(model(window[:, :-1])[0], window[0, 1:], reduction="none")]
    assert len(torch.cat(losses)) == 299
    assert validation_loss(model, valid) == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)

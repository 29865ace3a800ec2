"""What a rank prints is passed on by whole lines, however the pipe cuts it."""

import os
import sys
import time

from hvd_transformer.launch.node.rank_child import RankChild


def printed(script: str) -> list[str]:
    """The texts of a child's standard output, which is read whenever the pipe is full, or the child has ended."""
    child = RankChild(0, [sys.executable, "-c", script], ".", os.environ)
    texts: list[str] = []
    limit = time.monotonic() + 30
    while "out" in child.streams:
        assert time.monotonic() < limit
        time.sleep(0.02)  # enough to fill a pipe
        texts += [said["text"] for said in child.read("out")]
    while not child.reap():
        time.sleep(0.01)
    return texts


def test_lines_are_whole_where_the_pipe_is_always_full() -> None:
    texts = printed("print(('x' * 98 + '\\n') * 5000, end='')")
    assert "".join(texts) == ("x" * 98 + "\n") * 5000
    assert all(text.endswith("\n") for text in texts)


def test_a_line_without_an_end_is_passed_on() -> None:
    texts = printed("print('x' * 300_000, end=''); print('\\nlast', end='')")
    assert "".join(texts) == "x" * 300_000 + "\nlast"
    assert len(texts) > 2 and texts[-1] == "last"

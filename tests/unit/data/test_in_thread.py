"""Native work on a thread: stops are heard, and only work that computes counts as progress."""

import subprocess
import sys
import time

import pytest
from tokenizers import Tokenizer

from hvd_transformer.data.build_once import Stopped
from hvd_transformer.data.in_thread import in_thread
from hvd_transformer.data.tokenizers import BPETokenizer


def test_what_work_returns_and_raises() -> None:
    assert in_thread(lambda: 3, lambda: None) == 3
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 // 0, lambda: None)


LOOKS = """
import time
from hvd_transformer.data.in_thread import computing

def spin():
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        sum(range(1000))

for work in (lambda: time.sleep(1.0), spin):
    looks = []
    computing(work, lambda: looks.append(1))
    print(len(looks))
"""


def test_work_that_only_waits_is_no_progress() -> None:
    """In a process of its own: threads that other tests have left may compute."""
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=60)
    waiting, spinning = map(int, done.stdout.split())
    assert waiting == 0 < spinning, done.stderr


def test_learning_byte_pairs_can_be_stopped_while_it_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading of the texts is over; what is left runs in native code."""

    def merges(*args: object) -> None:
        end = time.thread_time() + 20
        while time.thread_time() < end:
            sum(range(1000))

    monkeypatch.setattr(Tokenizer, "train_from_iterator", merges, raising=False)
    began = time.monotonic()
    with pytest.raises(Stopped):
        BPETokenizer.train(["a text"], 300, 1, should_stop=lambda: True)
    assert time.monotonic() - began < 10

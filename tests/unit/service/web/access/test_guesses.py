"""How long clients that try tokens must wait."""

import pytest

from hvd_transformer.service.web.access.guesses import Guesses


def test_each_further_guess_waits_longer() -> None:
    guesses, now, tried = Guesses(), 1000.0, 0
    end = now + 86_400
    while now < end:
        now += guesses.wait("192.0.2.1", now)
        guesses.wrong("192.0.2.1", now)
        tried += 1
    assert tried < 10 + 10 + 86_400 / 300


def test_some_mistakes_are_free_and_are_forgotten() -> None:
    guesses = Guesses()
    for _ in range(10):
        assert guesses.wait("c", 5.0) == 0
        guesses.wrong("c", 5.0)
    assert guesses.wait("c", 5.0) == pytest.approx(1.0)
    assert guesses.wait("c", 6.0) == 0
    guesses.wrong("c", 5000.0)
    assert guesses.wait("c", 5000.0) == 0


@pytest.mark.parametrize(
    ("guesser", "same", "other"),
    [
        ("192.0.2.1", "192.0.2.1", "192.0.2.2"),
        ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.1", "::ffff:192.0.2.2"),
        ("fe80::1%eth0", "fe80::2%eth0", "name"),
    ],
)
def test_who_is_the_same_client(guesser: str, same: str, other: str) -> None:
    guesses = Guesses()
    for _ in range(20):
        guesses.wrong(guesser, 5.0)
    assert guesses.wait(same, 5.0) > 0
    assert guesses.wait(other, 5.0) == 0


def test_its_memory_is_bounded() -> None:
    guesses = Guesses()
    for number in range(20_000):
        guesses.wrong(f"client {number}", 5.0)
    assert len(guesses._clients) == 10_000

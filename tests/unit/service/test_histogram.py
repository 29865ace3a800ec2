"""Counts of durations in classes."""

from threading import Thread

from hvd_transformer.service.histogram import Histogram


def test_each_value_is_in_all_classes_above_it() -> None:
    histogram = Histogram((1.0, 10.0))
    for value in (0.5, 1.0, 1.5, 10.0, 11.0):
        histogram.observe(value)
    assert histogram.counts() == ((1.0, 10.0), (2, 4), 5, 24.0)


def test_an_empty_one() -> None:
    assert Histogram((1.0,)).counts() == ((1.0,), (0,), 0, 0.0)


def test_threads_lose_nothing() -> None:
    histogram = Histogram((1.0,))
    threads = [Thread(target=lambda: [histogram.observe(1.0) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert histogram.counts() == ((1.0,), (4000,), 4000, 4000.0)

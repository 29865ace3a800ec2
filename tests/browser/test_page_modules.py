"""Single modules of the pages, called in the browser and compared with what Python finds."""

import json
import math
from typing import Any

import pytest

from browser.chromium import Browser
from browser.conftest import Visit
from browser.fake_service import FakeServer


@pytest.fixture
def page(visit: Visit) -> Browser:
    return _page(visit)


def _page(visit: Visit) -> Browser:
    page = visit("/no/such/page")
    page.sees("There is no such page.")  # the login is done
    return page


def _call(page: Browser, module: str, expression: str, *arguments: Any) -> Any:
    """The value of an expression over a module `m` and arguments `a`."""
    script = f"const m = await import('/static/{module}.js'); const a = arguments; return JSON.stringify({expression})"
    return json.loads(page.run(script, *arguments))


def test_smoothing_is_the_unbiased_moving_average(page: Browser) -> None:
    values = [math.sin(number) + 5 for number in range(50)]
    weight = 0.9
    expected = [
        sum(weight ** (last - at) * values[at] for at in range(last + 1)) / sum(weight**at for at in range(last + 1))
        for last in range(len(values))
    ]
    assert _call(page, "curves", "m.smooth(a[0], a[1])", values, weight) == pytest.approx(expected)
    assert _call(page, "curves", "m.smooth(a[0], 0.5)", [1.0, None, 1.0]) == [1.0, None, 1.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (2.31449, "2.314"),
        (12480, "12,480"),
        (12480.6, "12,481"),
        (0.0003, "3e-4"),
        (3.14e-5, "3.14e-5"),
        (41_234_567.8, "41.2M"),
        (-0.5, "-0.5000"),
    ],
)
def test_numbers(page: Browser, value: float | None, text: str) -> None:
    assert _call(page, "format", "m.number(a[0])", value) == text


@pytest.mark.parametrize(
    ("line", "tags"),
    [
        ("", []),
        (" a  b,c ,a", ["a", "b", "c"]),
        ('"a b" c"d e"', ["a b", "c", "d e"]),
        ('"a ""b"" c" ""', ['a "b" c']),
        ('"half a', ["half", "a"]),
    ],
)
def test_tags_as_a_line(page: Browser, line: str, tags: list[str]) -> None:
    assert _call(page, "run_tags", "m.parseTags(a[0])", line) == tags
    assert _call(page, "run_tags", "m.parseTags(m.tagLine(a[0]))", tags) == tags


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (42, "42 s"), (200, "3 min 20 s"), (3600, "1 h"), (7500, "2 h 5 min"), (273_600, "3 d 4 h")],
)
def test_durations(page: Browser, seconds: float, text: str) -> None:
    assert _call(page, "format", "m.duration(a[0])", seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(512, "512 B"), (1536, "1.5 KiB"), (65 << 30, "65.0 GiB"), (700 << 20, "700 MiB")]
)
def test_bytes(page: Browser, value: int, text: str) -> None:
    assert _call(page, "format", "m.bytes(a[0])", value) == text


def test_filters_are_read_and_written(page: Browser) -> None:
    line = 'user:ada tag:sweep optimizer.lr:0.001 data.source:"my text" gpt small'
    found = _call(page, "runs_query", "m.parseFilter(a[0])", line)
    assert found == {
        "user": "ada",
        "tag": "sweep",
        "where": ["optimizer.lr:0.001", "data.source:my text"],
        "text": "gpt small",
    }
    assert _call(page, "runs_query", "m.filterLine(a[0])", found) == line


def test_the_best_of_some_values(page: Browser) -> None:
    best = "[...m.best(a[0], a[1])]"
    assert _call(page, "metrics", best, "valid_loss", [2.0, 1.0, None, 1.0]) == [1, 3]
    assert _call(page, "metrics", best, "valid_bleu", [2.0, 1.0]) == [0]
    for metric in ("f1_macro", "bleu_words", "exact_match"):  # of an own task, too: as training chooses its best
        assert _call(page, "metrics", best, f"valid_{metric}", [2.0, 1.0]) == [0]
    assert _call(page, "metrics", best, "test_web_loss", [2.0, 1.0]) == [1]
    assert _call(page, "metrics", best, "mfu", [0.2, 0.4]) == [1]
    assert _call(page, "metrics", best, "lr", [2.0, 1.0]) == []
    assert _call(page, "metrics", best, "network_sent_bytes_per_second", [2.0, 1.0]) == []
    assert _call(page, "metrics", best, "loss", [1.0, 1.0]) == []


def test_charts_group_a_metric_with_its_values_on_other_data(page: Browser) -> None:
    groups = _call(
        page, "metrics", "m.chartGroups(a[0])", ["lr", "step", "valid_loss", "other", "loss", "test_loss", "epoch"]
    )
    assert [group["keys"] for group in groups] == [["loss", "valid_loss", "test_loss"], ["lr"], ["other"]]


def test_curves_that_were_read_at_different_times_are_all_continued(visit: Visit, service: FakeServer) -> None:
    page, run = _page(visit), service.state.runs[0]
    run.step, run.speed, run.extra_steps = 300, 0.0, 0
    script = """
      const { Curves } = await import('/static/curves.js');
      window.curves ||= new Curves(arguments[0]);
      await window.curves[arguments[1]](arguments[2], { x: 'step', range: null }, 400);
      return [...window.curves.points.values()].map(({ x }) => x);
    """
    assert page.run(script, run.id, "read", ["loss"])[0][-1] == 300
    run.step = 450
    assert page.run(script, run.id, "read", ["lr"])[1][-1] == 450
    run.step = 460
    loss, rate = page.run(script, run.id, "follow", ["loss", "lr"])
    assert loss[-1] == rate[-1] == 460
    assert 400 in loss  # written after it was read, and before the rate was
    run.step = 470
    assert [x[-1] for x in page.run(script, run.id, "follow", ["loss", "lr", "grad_norm"])] == [470] * 3


def _row_pages(page: Browser, steps: str) -> Any:
    """What `steps` return: `rows` are read by `answers`, in the order in which they were asked for."""
    script = f"""
      const {{ RowPages }} = await import('/static/row_pages.js');
      const answers = [];
      const rows = new RowPages((cursor) => new Promise((tell) => answers.push({{ cursor, tell }})));
      const answer = async (...items) => {{
        while (!answers.length) await new Promise((wait) => setTimeout(wait));
        const {{ cursor, tell }} = answers.shift();
        tell({{ items, next: cursor ? null : 'more', total: 2 }});
      }};
      {steps}
    """
    return page.run(script)


def test_an_answer_that_a_newer_question_has_overtaken_is_not_told(page: Browser) -> None:
    steps = """
      const told = [];
      rows.onPage = ({ items }) => told.push(items[0]);
      const first = rows.restart(), second = rows.restart();
      answers.reverse();
      await answer('new'); await answer('old');
      await Promise.all([first, second]);
      return told;
    """
    assert _row_pages(page, steps) == ["new"]


def test_news_while_rows_are_being_read_is_not_lost(page: Browser) -> None:
    first = """
      rows.restart();
      const news = rows.refresh(0, 1);
      await answer('old'); await answer('new'); await news;
      return rows.rows;
    """
    assert _row_pages(page, first) == ["new"]
    more = """
      const first = rows.restart(); await answer('old'); await first;
      const more = rows.more(), news = rows.refresh(0, 2);
      await answer('second'); await answer('new'); await answer('newest');
      await Promise.all([more, news]);
      return rows.rows;
    """
    assert _row_pages(page, more) == ["new", "newest"]


def test_rows_of_an_earlier_question_are_not_added(page: Browser) -> None:
    steps = """
      const first = rows.restart(); await answer('old'); await first;
      const other = rows.restart(), more = rows.more();
      await answer('other'); await Promise.all([other, more]);
      return [rows.rows, answers.length];
    """
    assert _row_pages(page, steps) == [["other"], 0]

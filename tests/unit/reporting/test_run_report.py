"""The report of a run: finished, in progress, just started, or no run at all."""

import base64
import io
import json
import math
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from hvd_transformer.cli.report import report
from hvd_transformer.errors import UserError
from hvd_transformer.reporting import charts
from hvd_transformer.reporting.metrics_log import Columns
from hvd_transformer.reporting.run_report import write_report

CHARTS = ("loss.png", "learning_rate.png", "throughput.png")


class Page(HTMLParser):
    """The text and images of a page; fails if tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.images: list[bytes] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            source = dict(attrs)["src"] or ""
            assert source.startswith("data:image/png;base64,")
            self.images.append(base64.b64decode(source.split(",")[1]))
        elif tag != "meta":
            self.open.append(tag)
        assert tag not in ("link", "script")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style" and data.strip():
            self.words.append(data.strip())


@pytest.mark.parametrize("count", [3, 20, 60])
def test_the_legend_of_many_curves_is_whole(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    legends, original = [], charts._png

    def png(figure: Figure, axes: list[Axes], series: Any) -> bytes:
        made = original(figure, axes, series)
        box, whole = axes[0].get_legend().get_window_extent(), figure.bbox
        assert 0 <= box.x0 < box.x1 <= whole.x1 and 0 <= box.y0 < box.y1 <= whole.y1
        assert axes[0].get_window_extent().height > 0.4 * whole.height
        legends.append(len(axes[0].get_legend().get_texts()))
        return made

    monkeypatch.setattr(charts, "_png", png)
    rows = [{"step": step, **{f"valid_source{n}_loss": 5 - step / 10 + n for n in range(count)}} for step in (1, 2, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(charts.metric_charts(Columns(rows))) == {"losses"}
    assert legends == [count]


def write_run(folder: Path, steps: int) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(10, steps + 1, 10):
            loss = 3 + 5 * math.exp(-step / 100)
            line = {"step": step, "epoch": 1, "loss": loss, "lr": 1e-3, "grad_norm": 1.0}
            file.write(json.dumps(line | {"tokens_per_second": 12345.6}) + "\n")
            if step % 100 == 0:
                line = {"step": step, "valid_loss": loss, "valid_perplexity": math.exp(loss)}
                file.write(json.dumps(line) + "\n")


def check(run: Path, *metrics: str) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    charts = [CHARTS[0], *metrics, *CHARTS[1:]]
    assert sorted(path.name for path in run.glob("*.png")) == sorted(charts)
    for name, embedded in zip(charts, page.images, strict=True):
        data = (run / name).read_bytes()
        assert data == embedded
        image = Image.open(io.BytesIO(data))
        image.load()
        assert image.width == 1200
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    return page


def test_a_whole_run(tmp_path: Path) -> None:
    write_run(tmp_path, 1000)
    (tmp_path / "config.yaml").write_text("task: language_model\ndata:\n  source: <b>&amp;\n")
    summary = {"status": "completed", "steps": 1000, "seconds": 3723.4, "test_perplexity": 19.123456}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"world": 2, "test_bleu": None}))
    page = check(tmp_path)
    words = page.words
    assert words[words.index("test perplexity") + 1] == "19.12"
    assert words[words.index("tokens per second") + 1] == "12,346"
    assert words[words.index("seconds") + 1] == "1:02:03"
    assert words[words.index("steps") + 1] == "1,000"
    assert words[words.index("test_bleu") + 1] == "none"
    assert "task: language_model\ndata:\n  source: <b>&amp;" in words


def test_the_speed_is_in_what_the_task_counts(tmp_path: Path) -> None:
    write_run(tmp_path, 10)
    (tmp_path / "summary.json").write_text(json.dumps({"unit": "samples"}))
    words = check(tmp_path).words
    assert "samples per second" in words
    assert "tokens per second" not in words


def test_what_a_step_costs_is_at_the_top_and_below_the_throughput(tmp_path: Path) -> None:
    write_run(tmp_path, 200)
    check(tmp_path)
    before = Image.open(tmp_path / "throughput.png").height
    for step in (100, 200):
        waits = {"data_wait_milliseconds": 1.5, "communication_wait_milliseconds": 9.0, "milliseconds_per_step": 80.0}
        add_metrics(tmp_path, {"step": step, "mfu": 0.431, "peak_memory_bytes": 3 * 2**29, **waits})
    words = check(tmp_path).words
    assert words[words.index("MFU") + 1] == "43.1 %"
    assert words[words.index("peak memory") + 1] == "1.50 GiB"
    assert Image.open(tmp_path / "throughput.png").height > before  # a second panel


def add_metrics(folder: Path, *lines: dict[str, float | None]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_each_kind_of_metric_has_a_chart(tmp_path: Path) -> None:
    write_run(tmp_path, 200)
    names = ("accuracy", "precision", "recall", "f1", "precision_macro", "recall_macro", "f1_macro")
    for step in (100, 200):
        values = {f"valid_{name}": 0.5 + step / 1000 + index / 50 for index, name in enumerate(names)}
        bleu = {"valid_bleu": step / 4, "valid_bleu_words": 0.7}  # in percent, also a small one
        add_metrics(tmp_path, {"step": step, **bleu, **values, "valid_rmse": 0.3, "valid_a/b": 1.0, "epoch": 1})
    words = check(tmp_path, "bleu.png", "scores.png", "valid_rmse.png", "valid_a_b.png").words
    assert words[words.index("valid BLEU") + 1] == "50"
    assert words[words.index("valid accuracy") + 1] == "0.7"
    assert words[words.index("valid F1") + 1] == "0.76"
    alone = {name: (tmp_path / name).read_bytes() for name in ("bleu.png", "scores.png", "loss.png")}
    add_metrics(tmp_path, {"step": 150, "valid_bleu": 60.0})
    check(tmp_path, "bleu.png", "scores.png", "valid_rmse.png", "valid_a_b.png")
    assert (tmp_path / "bleu.png").read_bytes() != alone["bleu.png"]
    assert (tmp_path / "scores.png").read_bytes() == alone["scores.png"]
    assert (tmp_path / "loss.png").read_bytes() == alone["loss.png"]


def test_a_metric_without_a_value_has_none(tmp_path: Path) -> None:
    write_run(tmp_path, 100)
    add_metrics(tmp_path, {"step": 100, "valid_bleu": None, "valid_f1": 0.25, "accuracy": 0.5})
    check(tmp_path, "scores.png")


def test_a_run_that_still_goes(tmp_path: Path) -> None:
    write_run(tmp_path, 250)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 260, "loss": 3.')
    words = check(tmp_path).words
    assert words[words.index("steps") + 1] == "250"
    assert "No config.yaml." in words


def test_a_resumed_run_has_no_end_yet(tmp_path: Path) -> None:
    write_run(tmp_path, 250)
    (tmp_path / "summary.json").write_text(json.dumps({"status": "stopped", "steps": 250, "valid_perplexity": 50.0}))
    assert "stopped" in check(tmp_path).words
    add_metrics(tmp_path, {"step": 300, "valid_perplexity": 40.0})
    words = check(tmp_path).words
    assert "stopped" not in words
    assert words[words.index("steps") + 1] == "300"
    assert words[words.index("valid perplexity") + 1] == "40"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 1, "loss": 5.0, "lr": 0.0, "grad_norm": 0.0, "tokens_per_second": 0.0}],
        [{"step": 0, "valid_loss": 5.0, "valid_perplexity": 148.4}],
        [{"step": 1, "loss": None, "grad_norm": None}, {"step": 2, "loss": 4.0, "lr": 1e-9}],
        [{"step": step, "loss": None, "valid_loss": None, "valid_perplexity": None} for step in range(200)],
        [{"step": step, "loss": 4.0, "valid_loss": 4.0, "valid_perplexity": 54.6} for step in (1, 2)],
        [{"step": step, "loss": 0.0, "valid_loss": 1e-9, "valid_perplexity": 1.0} for step in range(90)],
        [{"step": step, "loss": 1e30 if step == 40 else 4, "grad_norm": 10.0**step} for step in range(90)],
        [{"step": step, "loss": 1e30, "valid_loss": 1e30, "valid_perplexity": None} for step in range(90)],
    ],
    ids=["empty", "one", "valid-only", "null", "all-null", "flat", "zero", "spike", "diverged"],
)
@pytest.mark.filterwarnings("error")
def test_few_and_odd_lines(tmp_path: Path, lines: list[dict[str, float | None]]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    check(tmp_path)


def test_a_long_run_is_drawn(tmp_path: Path) -> None:
    line = '{"step": %d, "loss": %f, "lr": 0.001, "grad_norm": 1.0, "tokens_per_second": 1000.0}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(line % (i, 3 + i % 7) for i in range(200_000)))
    check(tmp_path)


def test_a_long_run_is_labelled_with_its_last_and_its_best_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    draw = Axes.legend

    def legend(axes: Axes, *args: Any, **options: Any) -> Any:
        labels.extend(axes.get_legend_handles_labels()[1])
        return draw(axes, *args, **options)

    monkeypatch.setattr(Axes, "legend", legend)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 2501):  # the best one is neither the first nor the last of three
            loss, bleu = {2048: (1.0, 40.0), 2500: (9.0, 7.0)}.get(step, (2.0, 20.0))
            file.write(json.dumps({"step": step, "valid_loss": loss, "valid_bleu": bleu}) + "\n")
    write_report(tmp_path)
    assert labels == ["valid 9.000 (best 1.000 at step 2,048)", "bleu 7.00 (best 40.00 at step 2,048)"]


def test_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run directory: no metrics\.jsonl in it$"):
        write_report(tmp_path)
    with pytest.raises(UserError, match=r"none: not a run directory: no such file or directory$"):
        write_report(tmp_path / "none")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path) -> None:
    write_run(tmp_path, 100)
    result = CliRunner().invoke(report, [str(tmp_path)])
    assert result.exit_code == 0
    assert result.output == f"{tmp_path / 'report.html'}\n"
    (tmp_path / "loss.png").unlink()
    (tmp_path / "loss.png").mkdir()
    (tmp_path / "loss.png" / "inside").touch()
    failed = CliRunner().invoke(report, [str(tmp_path)])
    assert isinstance(failed.exception, UserError)
    assert "cannot write the report" in str(failed.exception)

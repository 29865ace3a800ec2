"""`hvd-transformer plan`: narrow text whose sums add up, and one line for wrong input."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from small_plan import SMALL, small_plan
from torch import nn

from hvd_transformer.cli import main as cli
from hvd_transformer.cli.plan import plan as command
from hvd_transformer.config import load
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.planning.memory_plan import make_plan
from hvd_transformer.planning.plan_text import plan_text


def test_text_is_narrow_and_its_arithmetic_adds_up() -> None:
    plan = make_plan(load("tutorial-1b", overrides=["training.device=cuda"]))
    text = plan_text(plan, 80, 4.5)
    assert "\ndevice:        GPU\n" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    sums = [line for line in text.splitlines() if " = " in line and line.startswith("stage ")]
    assert len(sums) == 2
    for line, stage in zip(sums, plan.stages, strict=True):
        parts, _, rest = line.partition(": ")[2].partition(" = ")
        total, _, answer = rest.partition(" of 4.50: ")
        assert sum(map(float, parts.split(" + "))) == pytest.approx(float(total))
        # Rounded up to hundredths of a GiB, each of the four.
        assert 0 <= float(total) * 2**30 - sum(plan.memory(stage)) <= 0.04 * 2**30
        assert answer == ("fits" if sum(plan.memory(stage)) <= 4.5 * 2**30 else "does not fit")
    assert {line.rpartition(": ")[2] for line in sums} == {"fits", "does not fit"}


def test_a_plan_says_for_which_device_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU all stages of a rank share one memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, said in [
        ("cpu", "CPU\n"),
        ("cuda", "GPU\n"),
        ("auto", "CPU, as there is no GPU here; training.device=cuda plans for GPUs\n"),
    ]:
        text = plan_text(small_plan("parallel.pipeline=2", f"training.device={device}"), 80, 1.0)
        assert f"\ndevice:        {said}" in text and max(map(len, text.splitlines())) <= 80
        assert ("all stages of a rank: " in text) == (device != "cuda")


def test_many_micro_batches_are_drawn_in_part() -> None:
    words = ["parallel.pipeline=2", "training.batch_size=40", "parallel.micro_batches=40"]
    assert "8 of its 40 micro-batches" in plan_text(small_plan(*words), 80)
    assert "of its" not in plan_text(small_plan(*words), 2000)


def test_command(tmp_path: Path) -> None:
    picture = tmp_path / "schedules.png"
    words = [*SMALL, "--vocab-size", "97", "--memory-gib", "1", "parallel.pipeline=2", "--output", str(picture)]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0
    model = LanguageModel(97, load(overrides=SMALL).model)
    assert f"{sum(weight.numel() for weight in nn.ParameterList(model.parameters())):,}" in done.output.splitlines()[0]
    assert "fits" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--preset", "nope"], "no such preset"),
        (["model.nope=1"], "unknown key"),
        (["--config", "/nonexistent.yaml"], "cannot be read"),
        (["--vocab-size", "1"], "at least 2"),
        (["--memory-gib", "0"], "above 0"),
        (["--memory-gib", "nan"], "above 0"),
        (["--output", "picture.pdf"], ".png"),
        (["--output", "/dev/null/picture.png"], "cannot be written"),
        (["parallel.pipeline=6"], "at most 5"),
        (["parallel.pipeline=2", "parallel.partition=[1, 1]"], "the model has 5"),
        (["data.tokenizer=char"], "--vocab-size"),
        (["--scale", "9" * 5000], "must be numbers of devices from 1 to 1000000"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], told: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["hvd-transformer", "plan", *SMALL, *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvd-transformer: ")
    assert told in line


def test_help_imports_no_torch() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from hvd_transformer.cli.main import group\n"
        "done = CliRunner().invoke(group, ['plan', '--help'])\n"
        "assert done.exit_code == 0 and '--memory-gib' in done.output, done.output\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_stages_of_a_rank_share_the_memory_of_a_cpu() -> None:
    plan = small_plan("parallel.pipeline=2", "training.device=cpu")
    sizes = [sum(plan.memory(stage)) for stage in plan.stages]
    between = (max(sizes) + sum(sizes)) / 2 / 2**30  # each stage fits, but not both
    assert plan_text(plan, 200, between).count("does not fit") == 1
    assert plan_text(plan, 200, 1.1 * sum(sizes) / 2**30).rstrip().count(": fits") == 1
    on_gpus = small_plan("parallel.pipeline=2", "training.device=cuda")
    assert plan_text(on_gpus, 200, 1.0).count(": fits") == 2

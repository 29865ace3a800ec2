"""A configuration is printed and repeats its run; two are compared; both programs tell the same version."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from commands import Done, command
from conftest import REPOSITORY, rank_environment
from jsonschema import Draft7Validator

from hvd_transformer.cli.config import diff
from hvd_transformer.cli.train import config_of
from hvd_transformer.config import Config, dump, load
from hvd_transformer.config.load import preset_names
from hvd_transformer.errors import UserError

EARLIER = REPOSITORY / "tests" / "checkpoints" / "format-2" / "run"
TINY = [
    "data.source=text.txt", "data.cache_dir=cache", "data.tokenizer=char", "data.workers=1", "data.sequence_length=8",
    "model.num_layers=1", "model.d_model=8", "model.num_heads=2", "model.d_feedforward=12", "model.dropout=0.1",
    "optimizer.lr=2e-3", "optimizer.clip_norm=none", "training.max_steps=4", "training.device=cpu", "seed=7",
]  # fmt: skip
# Where torch cannot be imported.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from hvd_transformer.cli import train
train.main()
"""


def run(program: str, *words: object, folder: Path, code: int = 0) -> str:
    """Standard output; with another exit code than 0, the one line of standard error."""
    done = command(program, *words, folder=folder, hide=("horovod", "mpi4py"))
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
        return done.stderr
    return done.stdout


def printed(*words: str, folder: Path, **environment: str) -> Done:
    return command("hvd-train", *words, "--print-config", folder=folder, environment=environment)


def differs(first: str, second: str) -> dict[str, list[object]]:
    """By `config diff --json`."""
    done = CliRunner().invoke(diff, [first, second, "--json"], catch_exceptions=False)
    found: dict[str, list[object]] = json.loads(done.stdout)["differs"]
    return found


def test_the_configuration_is_printed_without_torch_and_without_touching_output_dir(tmp_path: Path) -> None:
    words = ["--preset", "tiny", "--print-config", "output_dir=run", "optimizer.lr=1e-3", "training.max_steps=none"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words],
        cwd=tmp_path, env=rank_environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
    found = yaml.safe_load(done.stdout)
    assert {section: set(keys) for section, keys in found.items() if isinstance(keys, dict)} == {
        section: set(keys) for section, keys in Config().model_dump().items() if isinstance(keys, dict)
    }
    assert (found["optimizer"]["lr"], found["training"]["max_steps"], found["model"]["d_model"]) == (1e-3, None, 32)


@pytest.mark.parametrize("name", [None, *preset_names()])
def test_what_is_printed_is_loaded_as_the_same_configuration(name: str | None, tmp_path: Path) -> None:
    preset = ["--preset", name] if name else []
    (tmp_path / "job.yaml").write_text(printed(*preset, folder=tmp_path).stdout)
    assert load(file=tmp_path / "job.yaml") == load(name)
    assert printed("--config", "job.yaml", folder=tmp_path).stdout == (tmp_path / "job.yaml").read_text()


def test_the_printed_file_repeats_the_run_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("what is printed repeats the run. " * 40)
    (tmp_path / "job.yaml").write_text(printed(*TINY, "output_dir=again", folder=tmp_path).stdout)
    run("hvd-train", *TINY, "output_dir=first", folder=tmp_path)
    run("hvd-train", "--config", "job.yaml", folder=tmp_path)
    weights = [
        (tmp_path / name / "checkpoints" / "latest" / "model.safetensors").read_bytes() for name in ("first", "again")
    ]
    assert weights[0] == weights[1]
    assert (tmp_path / "again" / "config.yaml").read_text() == (tmp_path / "job.yaml").read_text()
    config = load(file=tmp_path / "first" / "config.yaml").model_copy(update={"output_dir": "again"})
    assert dump(config) == (tmp_path / "job.yaml").read_text()

    # The same runs, compared: as run directories, checkpoints and files.
    (tmp_path / "other.yaml").write_text(dump(load(overrides=[*TINY, "output_dir=other", "seed=8"])))
    monkeypatch.chdir(tmp_path)
    assert differs("first", "again") == {"output_dir": ["first", "again"]}
    assert differs("again", "job.yaml") == differs("again/checkpoints/latest", "again/config.yaml") == {}
    assert differs("first/checkpoints/latest", "other.yaml") == {"output_dir": ["first", "other"], "seed": [7, 8]}
    table = run("hvd-transformer", "config", "diff", "first", "other.yaml", folder=tmp_path)
    assert [line.split() for line in table.splitlines()] == [
        ["KEY", "FIRST", "SECOND"], ["output_dir", "first", "other"], ["seed", "7", "8"],
    ]  # fmt: skip
    assert run("hvd-transformer", "config", "diff", "again", "job.yaml", folder=tmp_path) == "no key differs\n"


def test_of_several_ranks_the_first_prints(tmp_path: Path) -> None:
    ranks = [printed(folder=tmp_path, HOROVOD_RANK=rank, HOROVOD_SIZE="2") for rank in "01"]
    assert [(done.returncode, done.stdout) for done in ranks] == [(0, dump(Config())), (0, "")]


def test_a_wrong_configuration_is_not_printed(tmp_path: Path) -> None:
    line = run("hvd-train", "--print-config", "seed=x", folder=tmp_path, code=2)
    assert line == "hvd-train: seed=x (command line): must be a valid integer\n"
    line = run("hvd-train", "--print-config", "model.d_model=30", "model.num_heads=4", folder=tmp_path, code=2)
    assert "model.d_model=30: must be a multiple of model.num_heads=4" in line


def test_a_job_prints_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--print-config: not for a job"):
        config_of(["--preset", "tiny", "--print-config"])
    for name in ("launch", "doctor"):
        line = run("hvd-transformer", name, "--", "--print-config", folder=tmp_path, code=2)
        assert "--print-config: not for a job" in line


def test_files_are_compared_with_the_defaults_of_what_they_leave_out(tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text("optimizer: {lr: 1e-2, clip_norm: none}\nmodel.num_layers: 4\n")
    (tmp_path / "none.yaml").write_text("")
    table = run("hvd-transformer", "config", "diff", "some.yaml", "none.yaml", folder=tmp_path)
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["optimizer.lr", "0.01", "0.001"], ["optimizer.clip_norm", "none", "1.0"],
    ]  # fmt: skip


def test_runs_of_an_earlier_version_are_compared(tmp_path: Path) -> None:
    checkpoint = next((EARLIER / "checkpoints").iterdir())
    assert run("hvd-transformer", "config", "diff", EARLIER, checkpoint, folder=tmp_path) == "no key differs\n"


def test_what_cannot_be_compared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text("seed: 2\n")
    (tmp_path / "bad.yaml").write_text("sed: 2\n")
    for name, text in (("list", "[]"), ("old", '{"step": 1}'), ("torn", '{"step"'), ("new", '{"config": {"x": 1}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(text)
    (tmp_path / "empty").mkdir()
    for word, told in {
        "absent": "absent: cannot be read: No such file or directory",
        "bad.yaml": "sed (bad.yaml): unknown key, did you mean seed?",
        "empty": "empty: neither a run directory nor a checkpoint: it has no config.yaml or state.json",
        "list": "list/state.json: not the state of a checkpoint: it has no configuration",
        "old": "old/state.json: not the state of a checkpoint: it has no configuration",
        "torn": "torn/state.json: cannot be read: ",
        "new": "x (new/state.json): unknown key",
    }.items():
        with pytest.raises(UserError, match=rf"^{re.escape(told)}"):
            differs("good.yaml", word)
    assert "absent: cannot" in run("hvd-transformer", "config", "diff", "absent", "good.yaml", folder=tmp_path, code=2)
    assert "Missing argument" in run("hvd-transformer", "config", "diff", "good.yaml", folder=tmp_path, code=2)


def test_the_schema_is_printed_for_editors(tmp_path: Path) -> None:
    found = json.loads(run("hvd-transformer", "config", "schema", folder=tmp_path))
    Draft7Validator(found).validate(yaml.safe_load(printed("--preset", "tiny", folder=tmp_path).stdout))
    assert not Draft7Validator(found).is_valid({"sed": 1})


def test_both_programs_tell_the_same_version(tmp_path: Path) -> None:
    told = {run(program, "--version", folder=tmp_path) for program in ("hvd-train", "hvd-transformer")}
    assert told == {f"hvd-transformer, version {version('hvd-transformer')}\n"}

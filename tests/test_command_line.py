"""What is wrong on a command line is told in one line with exit code 2; by each command once as a user starts it."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import command
from conftest import BIN, REPOSITORY, rank_environment

from hvd_transformer.cli import main

# Several command lines in one fresh process, where torch cannot be imported: what is told was found without it.
CALLS = """
import io, json, sys
from contextlib import redirect_stderr
sys.modules["torch"] = None
from hvd_transformer.cli import main, train
ended = []
for program, *words in json.loads(sys.argv[1]):
    sys.argv, text = [program, *words], io.StringIO()
    try:
        with redirect_stderr(text):
            (train if program == "hvd-train" else main).main()
    except SystemExit as end:
        ended.append((end.code, text.getvalue()))
print(json.dumps(ended))
"""
KEY = "nonsense (command line): unknown key"
NO_FOLDER = "no such checkpoint folder"
NO_RUN = "empty: neither a run directory nor a checkpoint nor an exported folder"


def refused(words: Sequence[str | Path], folder: Path) -> str:
    """The one line on stderr of a real command."""
    done = subprocess.run(words, cwd=folder, env=rank_environment(), capture_output=True, text=True, timeout=120)
    return told(done)


def told(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def refused_without_torch(folder: Path, *calls: str, **environment: str) -> list[str]:
    """The one line that each command line gets."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps([call.split() for call in calls])],
        cwd=folder, env=rank_environment() | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    assert len(ended) == len(calls)
    for call, (code, text) in zip(calls, ended, strict=True):
        assert (code, text.count("\n")) == (2, 1), f"{call}: exit code {code}\n{text}"
    return [text.strip() for _, text in ended]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`text.txt`, which is no checkpoint, `empty`, and `run`, which looks like one."""
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "broken.yaml").write_text("model:\n  num_layer: 2\n")
    return tmp_path


CONFIGURATIONS = {
    "nonsense=1": KEY,
    "training.batch_size=0": "training.batch_size=0 (command line): must be a number from 1 to 1000000000000, or auto",
    "model.d_model=30 model.num_heads=4": "model.d_model=30: must be a multiple of model.num_heads=4",
    "--preset tinny": "--preset tinny: no such preset, did you mean tiny?",
    "--config absent.yaml": "absent.yaml: cannot be read: No such file or directory",
    "--config broken.yaml": "model.num_layer (broken.yaml): unknown key, did you mean model.num_layers?",
    "--presett tiny": "No such option",
}


@pytest.mark.parametrize("environment", [{}, {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}], ids=["alone", "launched"])
def test_a_wrong_configuration_is_told_before_torch_is_imported(folder: Path, environment: dict[str, str]) -> None:
    benches = [f"bench {name}" for name in ("train", "checkpoint", "data")]
    commands = ["plan", "prepare", "launch --", "doctor --", *benches, "launch -- bench train"]
    names = ["hvd-train", *(f"hvd-transformer {name}" for name in commands)]
    calls = {f"{name} {words}": message for name in names for words, message in CONFIGURATIONS.items()}
    for line, (call, message) in zip(refused_without_torch(folder, *calls, **environment), calls.items(), strict=True):
        assert message in line, call


def test_a_wrong_checkpoint_is_told_before_torch_is_imported(folder: Path) -> None:
    calls = {
        f"{name} {path}": message
        for name in ("translate", "classify", "evaluate", "generate --prompt x", "launch -- evaluate")
        for path, message in (("absent", NO_FOLDER), ("text.txt", NO_FOLDER), ("empty", NO_RUN))
    }
    calls |= {
        "export absent new": NO_FOLDER,
        "export empty new": NO_RUN,
        "report absent": "absent: not a run directory",
        "generate run": "give --prompt TEXT or --file FILE",
        "generate run --file absent": "absent: cannot be read: No such file",
        "evaluate run nonsense=1": KEY,
        "evaluate run training.eval_batch_size=0": "training.eval_batch_size=0 (command line): must be greater",
        "evaluate run nonsense": "nonsense: not of the form KEY=VALUE",
        "launch -- evaluate run nonsense=1": KEY,
    }
    lines = refused_without_torch(folder, *(f"hvd-transformer {call}" for call in calls))
    for line, (call, message) in zip(lines, calls.items(), strict=True):
        assert message in line, call


NUMBERS = {
    "generate run --prompt x --temperature": "nan inf -inf -1 -0.5 1e400 hot",
    "generate run --prompt x --top-p": "nan inf -1 0 1.5 all",
    "generate run --prompt x --top-k": "nan inf -1 0 1.5",
    "generate run --prompt x --tokens": "nan inf -1 0 1.5",
    "generate run --prompt x --seed": "nan inf -1 1.5",
    "translate run --length-penalty": "nan inf -1 1e300 1e400",
    "translate run --beam": "nan inf -1 0 1.5",
    "translate run --batch-size": "nan inf -1 0",
    "classify run --batch-size": "nan inf -1 0",
    "evaluate run --split": "nan",
    "plan --preset tiny --memory-gib": "nan inf -1 0 much",
    "launch -np": "nan inf -1 0 1.5",
    "launch --restarts": "nan inf -1 1.5",
    "launch -np 2 --min-np": "nan inf -1 0 3",
    "launch --ssh-port": "nan inf -1 0 65536",
    "doctor --ssh-port": "nan inf -1 0 65536",
    "bench train --seconds": "nan inf -1 0 1e9 long",
    "bench data --seconds": "nan inf -1 0 1e9 long",
    "bench checkpoint --vocab-size": "nan inf 1.5",
    "bench allreduce --sizes": "nan inf -1 0 1.5 3 1K,much",
}


def test_a_number_that_is_none_is_told_with_its_option(folder: Path) -> None:
    calls = [
        (option, f"hvd-transformer {option} {value}") for option, wrong in NUMBERS.items() for value in wrong.split()
    ]
    for line, (option, call) in zip(refused_without_torch(folder, *(call for _, call in calls)), calls, strict=True):
        assert option.split()[-1] in line, call


@pytest.mark.parametrize("words", [["--vocab-size", value] for value in ("-1", "0", "1", "99999999999999999999")])
def test_a_vocabulary_that_cannot_be(folder: Path, words: list[str]) -> None:
    line = told(command("hvd-transformer", "plan", "--preset", "tiny", *words, folder=folder))
    assert line == f"hvd-transformer: --vocab-size {words[1]}: must be at least 2 and at most 2147483648"


# Each command once, with something that it finds without torch.
COMMANDS = {
    "hvd-train": "lr=1",
    **{
        f"hvd-transformer {name}": "absent"
        for name in ("translate", "classify", "generate", "evaluate", "report", "attach", "stop")
    },
    "hvd-transformer export": "absent new",
    **{f"hvd-transformer {name}": "lr=1" for name in ("plan", "prepare")},
    "hvd-transformer bench": "train lr=1",
    **{f"hvd-transformer {name}": "-- lr=1" for name in ("launch", "doctor")},
    **{f"hvd-transformer {name}": "--server absent" for name in ("submit", "queue", "hosts")},
    **{f"hvd-transformer {name}": "0" for name in ("cancel", "hold", "release", "retry", "wait", "compare")},
    "hvd-transformer show": "7 --server absent",
    "hvd-transformer logs": "7 --rank absent",
    "hvd-transformer priority": "7 absent",
    "hvd-transformer token": "add absent",
    "hvd-transformer config": "diff absent absent",
    "hvd-transformer serve": "--port absent",
    "hvd-transformer sweep": "absent",
}


@pytest.mark.parametrize("words", [f"{name} {wrong}" for name, wrong in COMMANDS.items()])
def test_every_command_as_a_user_starts_it(folder: Path, words: str) -> None:
    program, *rest = words.split()
    assert refused([BIN / program, *rest], folder).startswith(program)


def test_every_command_is_among_them() -> None:
    assert {name.split()[1] for name in COMMANDS if " " in name} == set(main.COMMANDS)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["hvd-train", "--presett"], "hvd-train: No such option '--presett'."),
        (["hvd-transformer", "trian"], "hvd-transformer: No such command 'trian'."),
        (["hvd-train", "output_dir=runs/hvd-train", "nonsense=1"], "hvd-train: nonsense (command line): unknown key"),
        (["hvd-transformer", "lanch"], "hvd-transformer: No such command 'lanch', did you mean launch?"),
        (["hvd-transformer", "generate"], "hvd-transformer generate: Missing argument 'CHECKPOINT'."),
        (["hvd-transformer", "launch", "-n"], "hvd-transformer launch: No such option '-n'."),
        (["hvd-transformer", "launch", "--", "--presett"], "hvd-train: No such option '--presett'."),
        (
            ["hvd-transformer", "launch", "-np", "2", "--preset", "tiny"],
            "hvd-transformer launch: --preset is an option of hvd-train: write it after --, as in "
            "'hvd-transformer launch … -- --preset …'",
        ),
    ],
)
def test_click_s_own_errors_are_one_line_with_the_command(folder: Path, words: list[str], line: str) -> None:
    assert told(command(*words, folder=folder)).startswith(line)


@pytest.mark.parametrize("module", ["train", "main"])
def test_the_modules_are_commands_too(module: str) -> None:
    program = [sys.executable, "-m", f"hvd_transformer.cli.{module}"]
    assert "nonsense" in refused([*program, *(["plan"] if module == "main" else []), "nonsense=1"], REPOSITORY)


def test_help_and_version_and_nothing(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return command("hvd-transformer", *words, folder=tmp_path)

    assert command("hvd-train", "--help").stdout.startswith("Usage: ")
    assert (run("--version").returncode, run("plan", "--help").returncode) == (0, 0)
    assert "Commands:" in run("--help").stdout
    nothing = run()
    assert "Commands:" in nothing.stdout + nothing.stderr


def test_a_value_of_two_lines_is_told_in_one(folder: Path) -> None:
    assert "two lines" in told(command("hvd-transformer", "plan", "--preset", "two\nlines", folder=folder))


@pytest.mark.parametrize(
    "words",
    ["generate secret/run --prompt a", "evaluate secret/run", "config diff secret/run a", "bench data --json secret/a"],
)
def test_a_folder_of_another_user(folder: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "secret" / "run").mkdir(parents=True)
    stat = Path.stat

    def refused_stat(path: Path, **options: bool) -> os.stat_result:  # root may look everywhere
        if path.parts[0] == "secret":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused_stat)
    line = told(command("hvd-transformer", *words.split(), folder=folder))
    assert re.fullmatch(r"hvd-transformer: secret/\w+: (cannot be read: )?Permission denied", line)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config", "diff", "a" * 300, "run"], "File name too long"),
        (["attach", "text.txt"], "text.txt: no such run directory"),
        (["stop", "text.txt"], "text.txt: no such run directory"),
    ],
)
def test_a_path_that_cannot_be(folder: Path, words: list[str], said: str) -> None:
    assert refused([BIN / "hvd-transformer", *words], folder).endswith(said)


@pytest.mark.parametrize("words", [["hvd-train", "--help"], ["hvd-transformer", "launch", "--help"]])
def test_help_on_a_terminal_without_unicode(words: list[str]) -> None:
    environment = rank_environment() | {"PYTHONIOENCODING": "iso-8859-1"}
    done = subprocess.run([BIN / words[0], *words[1:]], env=environment, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Usage: " + words[0].encode() in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([BIN / "hvd-train", "--print-config"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "hvd-train: the output cannot be written: No space left on device\n")

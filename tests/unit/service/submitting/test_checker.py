"""The process that checks configurations, for real: its lines against hvd-train's own, its limits and its crashes."""

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import command

from hvd_transformer.cli import job_checker
from hvd_transformer.cli.job_checker import as_words
from hvd_transformer.cli.train import config_of
from hvd_transformer.config import load
from hvd_transformer.config.load import preset_names
from hvd_transformer.config.schema import flatten
from hvd_transformer.errors import UserError
from hvd_transformer.service.submitting.checker import Checked, Checker
from hvd_transformer.service.submitting.not_now import NotNow


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    made = Checker(tmp_path_factory.mktemp("code"))
    yield made
    made.close()


def refused(checker: Checker, folder: Path, *words: str, **more: object) -> str:
    with pytest.raises(UserError) as error:
        checker.check(str(folder), [words], **more)  # type: ignore[arg-type]
    return str(error.value)


def test_the_configuration_is_what_hvd_train_would_use(checker: Checker, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model:\n  d_model: 60\ndata:\n  split: [0.8, 0.2]\nparallel:\n  tensor: 2\n")
    words = ["--preset", "tiny", "--config", "mine.yaml", "training.max_steps=5"]
    (job,) = checker.check(str(tmp_path), [words]).jobs
    expected = flatten(load("tiny", tmp_path / "mine.yaml", ["training.max_steps=5"]))
    del expected["output_dir"]
    assert job.config == expected
    assert (job.tensor, job.pipeline, job.device, job.name) == (2, 1, "auto", "tiny")
    (tmp_path / "mine.yaml").write_text("model:\n  d_model: 30\n")  # a later change does not matter
    again = flatten(config_of(job.words))
    del again["output_dir"]
    assert again == expected


@pytest.mark.parametrize("preset", preset_names())
def test_words_make_the_same_configuration(preset: str) -> None:
    config = load(preset)
    assert flatten(config_of([*as_words(config), f"output_dir={config.output_dir}"])) == flatten(config)


def test_values_that_are_not_plain_words(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "task: classification\n"
        "data: {source: ' a=b ', split: [0.5, 1.0e-9], class_weights: {'yes: no': 1, 'ä\"\\n': 2.5, '12': 1.0e-7}}\n"
        "optimizer: {betas: [0.0, 1.0e-12], clip_norm: null, eps: 1.0e-300}\n"
        "training: {compile: true, best_metric: '-loss'}\n"
    )
    config = load(file=tmp_path / "c.yaml")
    assert flatten(config_of([*as_words(config), "output_dir=runs/default"])) == flatten(config)
    (tmp_path / "c.yaml").write_text("data: {sources: [{source: x, weight: 1.0e-05}, {source: y, weight: 1}]}")
    config = load(file=tmp_path / "c.yaml")
    assert flatten(config_of([*as_words(config), "output_dir=runs/default"])) == flatten(config)
    (tmp_path / "c.yaml").write_text("data: {source: '[a]'}")
    with pytest.raises(
        UserError, match=r"^data.source=\[a\]: a text that begins like a list or a table cannot be submitted"
    ):
        as_words(load(file=tmp_path / "c.yaml"))
    config = load(overrides=["optimizer.lr_scaling=none"])  # a choice like others
    assert as_words(config) == ["optimizer.lr_scaling=none"]
    (tmp_path / "c.yaml").write_text("task: classification\ndata: {positive_label: 'none'}")
    with pytest.raises(UserError, match="^data.positive_label=none: a name that means no value on a"):
        as_words(load(file=tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense=1"],
        ["training.batch_size=0"],
        ["model.d_model=30", "model.num_heads=4"],
        ["--preset", "tinny"],
        ["--config", "absent.yaml"],
        ["--config", "broken.yaml"],
        ["--presett", "tiny"],
        ["evaluate", "runs/x"],
    ],
)
def test_wrong_input_gets_the_line_of_hvd_train(checker: Checker, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "broken.yaml").write_text("model:\n  num_layer: 2\n")
    told = command("hvd-train", *words, folder=tmp_path)
    assert told.returncode == 2
    assert f"hvd-train: {refused(checker, tmp_path, *words)}\n" == told.stderr


def test_a_job_trains(checker: Checker, tmp_path: Path) -> None:
    line = "--print-config: not for a job; use hvd-train --print-config"
    assert refused(checker, tmp_path, "--preset", "tiny", "--print-config") == line
    assert refused(checker, tmp_path, "--version") == "--version: not for a job"


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        (["-np", "3"], "-np: not for a job of the service, which chooses the hosts and starts it"),
        (["--hostfile", "x"], "--hostfile: not for a job of the service, which chooses the hosts and starts it"),
        (["--detach"], "--detach: not for a job of the service, which chooses the hosts and starts it"),
        (["--restarts", "-1"], "--restarts -1: must be 0 or more"),
        (["--gloo", "word"], "word: not an option of launch"),
        (["--", "output_dir=x"], "output_dir=x: not an option of launch"),
        (["--help"], "--help: not for a job"),
        (["--save-timeout", "0"], "Invalid value for '--save-timeout'"),
    ],
)
def test_launch_options(checker: Checker, tmp_path: Path, launch: list[str], line: str) -> None:
    assert refused(checker, tmp_path, launch=launch).startswith(line)
    checker.check(str(tmp_path), [[]], ["--mpi", "--restarts", "2", "--save-timeout", "5m", "--no-preflight"])


@pytest.mark.parametrize(
    ("sizes", "words", "line"),
    [
        ((3, None), ["parallel.tensor=2"], "-np 3: must be a multiple of parallel.tensor=2"),
        ((4, 3), ["parallel.tensor=2"], "--min-np 3: must be a multiple of parallel.tensor=2"),
        ((4, 5), [], "--min-np 5: must be from 1 to the number of ranks, 4"),
        ((4, 2), [], "--min-np 2: needs training.global_batch_size, so that a step has as many samples on any number"),
        ((16, None), ["training.global_batch_size=8"], "training.global_batch_size=8: is enough for 8 ranks, not"),
    ],
)
def test_numbers_of_ranks(
    checker: Checker, tmp_path: Path, sizes: tuple[int, int | None], words: list[str], line: str
) -> None:
    assert refused(checker, tmp_path, *words, num_ranks=sizes[0], min_ranks=sizes[1]).startswith(line)
    checker.check(str(tmp_path), [["training.global_batch_size=8"]], num_ranks=4, min_ranks=2)
    checker.check(str(tmp_path), [[]], num_ranks=4, min_ranks=4)


def test_only_the_users_own_output_dir_counts(checker: Checker, tmp_path: Path) -> None:
    (tmp_path / "with.yaml").write_text("output_dir: runs/file\n")
    given = [["--preset", "tiny"], [], ["output_dir=a"], ["--config", "with.yaml"], ["output_dir=~/b"]]
    found = [job.output_dir for job in checker.check(str(tmp_path), given).jobs]
    assert found == [None, None, f"{tmp_path}/a", f"{tmp_path}/runs/file", str(Path("~/b").expanduser())]


def test_the_code_of_a_task_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine.py").write_text("raise SystemExit('it is not imported')\nclass A: ...\nclass B: ...\n")
    checker = Checker(tmp_path / "code")
    try:
        checked = checker.check(str(folder), [["task=mine:A"], ["task=mine:B"]])
        assert (tmp_path / "code" / checked.code / "mine.py").read_text() == (folder / "mine.py").read_text()
        assert [job.name for job in checked.jobs] == ["A", "B"]
        assert refused(checker, folder, "task=mine:C").startswith("task=mine:C: cannot be imported: AttributeError")
    finally:
        checker.close()


def test_a_folder_that_is_not_here(checker: Checker, tmp_path: Path) -> None:
    line = refused(checker, tmp_path / "absent")
    assert line == f"folder {tmp_path}/absent: cannot be used on the service's host: No such file or directory"


def test_it_never_imports_torch(checker: Checker, tmp_path: Path) -> None:
    checker.check(str(tmp_path), [["--preset", "tiny"]])
    assert "torch" not in Path(f"/proc/{checker.pid}/maps").read_text()
    script = (
        "import sys; from hvd_transformer.service.submitting import checker, submission; "
        "sys.exit(bool({'torch', 'numpy', 'hvd_transformer.cli'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_crash_is_one_error_and_the_next_request_works(checker: Checker, tmp_path: Path) -> None:
    expected = checker.check(str(tmp_path), [[]])
    os.mkfifo(tmp_path / "waits.yaml")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(refused, checker, tmp_path, "--config", "waits.yaml")
        with (tmp_path / "waits.yaml").open("w"):  # returns when it is being read
            crashed = checker.pid
            assert crashed is not None
            os.kill(crashed, signal.SIGKILL)
            assert asked.result(30) == "the process that checks configurations has ended with signal 9; try again"
    assert checker.check(str(tmp_path), [[]]) == expected
    process = checker._process
    assert process is not None and process.pid != crashed
    process.kill()  # between two requests nobody notices
    process.wait(30)
    assert checker.check(str(tmp_path), [[]]) == expected


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("/bin/false", "has ended with exit code 1; try again"),
        ("/bin/true", "does not start; see the service's output"),
        ("/no/such/python", "does not start: No such file or directory"),
    ],
)
def test_a_process_that_does_not_work_is_no_fault_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, line: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(NotNow, match=f"^the process that checks configurations {line}$"):
        Checker(tmp_path).check(str(tmp_path), [[]])


def test_what_is_wrong_with_a_job_does_not_pass(checker: Checker, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        checker.check(str(tmp_path), [["no.such=1"]])
    assert not isinstance(caught.value, NotNow)


def test_it_ends_when_it_is_idle_or_the_service_ends(tmp_path: Path) -> None:
    checker = Checker(tmp_path, idle=0.05)
    answers: list[Checked] = []
    for _ in range(3):  # whether it has just ended or not
        answers.append(checker.check(str(tmp_path), [[]]))
        process = checker._process
        assert process is not None
        assert process.wait(30) == 0
    assert answers[0] == answers[1] == answers[2]
    checker = Checker(tmp_path)
    checker.check(str(tmp_path), [[]])
    process, connection = checker._process, checker._socket
    assert process is not None and connection is not None
    connection.close()  # as the kernel does when the service is killed
    assert process.wait(30) == 0


def test_a_check_has_limits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "waits.yaml")  # nobody writes to it
    checker = Checker(tmp_path, limit=3)
    try:
        line = "the check of the configuration took longer than 3 seconds"
        assert refused(checker, tmp_path, "--config", "waits.yaml") == line
        pid = checker.pid
        deep = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
        (tmp_path / "laughs.yaml").write_text(deep)
        assert "more than 100,000 values" in refused(checker, tmp_path, "--config", "laughs.yaml")
        assert checker.pid == pid
    finally:
        checker.close()


def test_what_becomes_of_a_child_that_dies(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def crash(request: object) -> None:
        faulthandler.disable()  # pytest's would write of it to the screen
        os.kill(os.getpid(), signal.SIGSEGV)

    def fail(request: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(job_checker, "check", crash)
    assert b"failed with signal 11" in job_checker.answer_to(b"{}", 30)
    monkeypatch.setattr(job_checker, "check", fail)
    assert b"failed with exit code 1; see the service's output" in job_checker.answer_to(b"{}", 30)
    assert "RuntimeError: a mistake of ours" in capfd.readouterr().err

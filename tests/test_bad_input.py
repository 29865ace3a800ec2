"""Wrong input to `hvd-train`: one line that names what is wrong and what is allowed, exit code 2, no loss.

In this process; a full disk and a damaged file meet the real command.
"""

import json
import os
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from commands import command
from conftest import BIN, rank_environment

SMALL = [
    "model.num_layers=1", "model.d_model=16", "model.num_heads=2", "model.d_feedforward=32",
    "data.tokenizer=char", "data.sequence_length=8", "training.batch_size=2", "training.max_steps=4",
    "checkpoint.every_steps=2",
]  # fmt: skip
TEXT = "".join(f"line {number} of a text, nothing more\n" for number in range(40))


def hvd_train(folder: Path, *words: str, real: bool = False) -> subprocess.CompletedProcess[str]:
    words = (f"data.cache_dir={folder / 'cache'}", *words)
    if not real:
        return command("hvd-train", *words, folder=folder)
    return subprocess.run(
        [BIN / "hvd-train", *words], cwd=folder, env=rank_environment(), capture_output=True, text=True, timeout=120
    )


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below but prepared data, with what the files hold."""
    paths = (path for path in folder.rglob("*") if "cache" not in path.relative_to(folder).parts)
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def refused(folder: Path, *words: str) -> str:
    """The one line that this input gets; it changes nothing."""
    before = contents(folder)
    line = told(folder, *words)
    assert contents(folder) == before
    return line


def told(folder: Path, *words: str) -> str:
    """The one line."""
    done = hvd_train(folder, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("hvd-train: ")
    return lines[0]


def write_folder(folder: Path, **texts: str | bytes) -> Path:
    folder.mkdir()
    for split, text in {"train": TEXT, "valid": TEXT, "test": TEXT, **texts}.items():
        (folder / f"{split}.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=1"], "lr (command line): unknown key, did you mean optimizer.lr?"),
        (["model.num_layer=1"], "unknown key, did you mean model.num_layers?"),
        (["data.batch_size=8"], "unknown key, did you mean training.batch_size?"),
        (
            ["training.batch_size=many"],
            "training.batch_size=many (command line): must be a number from 1 to 1000000000000, or auto",
        ),
        (["training.compile=perhaps"], "training.compile=perhaps (command line): must be true or false"),
        (["training.stall_seconds=0"], "training.stall_seconds=0 (command line): must be greater than 0"),
        (
            ["training.batch_size=0"],
            "training.batch_size=0 (command line): must be a number from 1 to 1000000000000, or auto",
        ),
        (
            [f"training.epochs={10**13}"],
            f"training.epochs={10**13} (command line): must be less than or equal to {10**12}",
        ),
        (["model.num_layers=20000"], "model.num_layers=20000 (command line): must be less than or equal to 10000"),
        (["model.dropout=1.5"], "model.dropout=1.5 (command line): must be less than 1"),
        (["optimizer.schedule=foo"], "must be 'constant', 'step', 'cosine', 'linear', 'wsd' or 'noam'"),
        (["model.d_model=30", "model.num_heads=4"], "model.d_model=30: must be a multiple of model.num_heads=4"),
        (["data.sequence_length=4096"], "data.sequence_length=4096: longer than the model's positions"),
        (
            ["training.accumulation=2", "training.global_batch_size=16"],
            "training.accumulation=2: not with training.global_batch_size=16",
        ),
        (
            ["data.batch_tokens=1000"],
            "data.batch_tokens=1000: not with task=language_model, only with task=translation or",
        ),
        (["data.train=part1"], "data.train=part1: only if data.source is a folder; python-docs is not a folder"),
        (["training.global_batch_size=0"], "training.global_batch_size=0 (command line): must be greater than or"),
        (["training.max_steps"], "not of the form KEY=VALUE"),
        (["hvd-train", "--preset", "tiny"], "hvd-train: leave it out; only its arguments belong here"),
        (
            ["task=classification"],
            "data.source=python-docs: only for task=language_model; name a file or folder of this",
        ),
        (["task=translation"], "data.source=python-docs: only for task=language_model; name a file or folder of this"),
        (["--preset", "tutorial-2b"], "no such preset, did you mean tutorial-1b?"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read"),
    ],
)
def test_settings(tmp_path, words, message):
    assert message in refused(tmp_path, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.pipeline=4"], "parallel.pipeline=4: more stages than the model's 3 layers; at most 3"),
        (["parallel.partition=[1, 1]"], "parallel.partition=[1, 1]: "),
        (["parallel.partition=[3, 0]"], "parallel.partition=[3, 0]: "),
        (["parallel.partition=[1, 1, 1]"], "parallel.partition=[1, 1, 1]: "),
        (["parallel.partition=halves"], "parallel.partition=halves: must be auto, uniform, a list"),
        (["parallel.partition=absent.module:cut"], "parallel.partition=absent.module:cut: cannot be imported"),
        (["parallel.micro_batches=3"], "parallel.micro_batches=3: more than the training.batch_size=2 samples"),
        (["parallel.schedule=zigzag"], "must be 'gpipe', '1f1b' or 'zero_bubble'"),
        (["training.device=cuda"], "for 1 rank × 2 stages"),
        (["parallel.tensor=3"], "parallel.tensor=3: must divide model.num_heads=2"),
        (
            ["parallel.tensor=2"],
            "parallel.tensor=2: must divide the job's number of ranks, 1: it can be 1",
        ),
    ],
)
def test_a_pipeline_that_cannot_be(tmp_path, words, message, monkeypatch):
    if "cuda" in words[0] and not torch.cuda.is_available():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # there may be GPUs that torch cannot use
    if "cuda" in words[0] and torch.cuda.device_count() > 1:
        pytest.skip("this machine has the GPUs")
    assert message in refused(tmp_path, *SMALL, "parallel.pipeline=2", "data.source=absent", *words)


def test_a_partition_function_of_the_working_directory(tmp_path):
    (tmp_path / "cut.py").write_text("def halves(name):\n    return int(name != 'embedding')\n")
    text = write_folder(tmp_path / "text")
    words = [
        "parallel.pipeline=2",
        "parallel.partition=cut:halves",
        f"data.source={text}",
        "output_dir=run",
        "profile=true",
    ]
    done = hvd_train(tmp_path, *SMALL, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["pp"] == 2
    names = {event["name"] for event in json.loads((tmp_path / "run/timeline-000.json").read_text())["traceEvents"]}
    assert names >= {"forward 0", "backward 0", "update"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=translating"], "task=translating (command line): must be 'language_model', 'translation', 'classif"),
        (["task=absent.module:Task"], "task=absent.module:Task: cannot be imported: ModuleNotFoundError"),
        (["task=pathlib:Path"], "task=pathlib:Path: must be a subclass of hvd_transformer.tasks.task.Task"),
        (["task=hvd_transformer.tasks.task:Task"], "lacks batch, describe, evaluation_batches"),
        (["task=translation"], "data.source=absent: no such file or folder"),
        (
            ["task=translation", "data.sequence_length=1024"],
            "model.max_length=1024 minus one for the target's start token",
        ),
        (["task=classification", "data.batching=columns"], "data.batching=columns: not with task=classification"),
        (
            ["task=classification", "training.label_smoothing=1"],
            "training.label_smoothing=1 (command line): must be less",
        ),
    ],
)
def test_tasks(tmp_path, words, message):
    assert message in refused(tmp_path, *SMALL, "data.source=absent", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.positive_label=maybe"], "data.positive_label=maybe: no such label; the labels are bad, good"),
        (["data.class_weights={good: 1}"], "data.class_weights: the label bad is missing; the labels are bad, good"),
        (
            ["data.class_weights={good: 1, bad: -1}"],
            "data.class_weights={good: 1, bad: -1} (command line): must be",
        ),
        (["data.text_column=review"], "data.text_column=review: "),
        (
            ["training.best_metric=bleu"],
            "training.best_metric=bleu: no such metric of this task; it has loss, accuracy",
        ),
    ],
)
def test_labelled_texts(tmp_path, words, message):
    (tmp_path / "rows.csv").write_text("text,label\n" + "a nice thing,good\na thing,bad\n" * 20)
    common = [*SMALL, "task=classification", "data.source=rows.csv", "data.split=[0.8, 0.2]", *words]
    assert message in refused(tmp_path, *common)


def test_a_task_of_ones_own_without_a_valid_split(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\n" + "a nice thing,good\na thing,bad\n" * 20)
    (tmp_path / "unchecked.py").write_text(
        "from hvd_transformer.tasks.classification_task import ClassificationTask\n"
        "class Unchecked(ClassificationTask):\n"
        "    def has_split(self, split):\n"
        "        return False\n"
    )
    told = refused(tmp_path, *SMALL, "task=unchecked:Unchecked", "data.source=rows.csv", "training.best_metric=loss")
    assert "task=unchecked:Unchecked: has no valid split, which is needed to choose the best checkpoint" in told


def test_a_configuration_file_names_its_line(tmp_path):
    (tmp_path / "job.yaml").write_text("model:\n  num_layers: 2\n d_model: 3\n")
    assert "job.yaml, line 3: not valid YAML" in refused(tmp_path, "--config", "job.yaml")


def test_no_data_folder(tmp_path):
    assert "data.source=absent: no such file or folder" in refused(tmp_path, "data.source=absent", *SMALL)


def test_an_empty_data_folder(tmp_path):
    (tmp_path / "text").mkdir()
    assert "text: the folder is empty; it must hold train.txt" in refused(tmp_path, "data.source=text", *SMALL)


def test_an_empty_split(tmp_path):
    write_folder(tmp_path / "text", valid="")
    assert "valid.txt: the valid split is empty" in refused(tmp_path, "data.source=text", *SMALL)


def test_a_text_shorter_than_a_window(tmp_path):
    write_folder(tmp_path / "text", train="short")
    line = refused(tmp_path, "data.source=text", *SMALL)
    assert "the training split has 5 tokens, but one sample of data.sequence_length=8 needs 9" in line


def test_invalid_utf8(tmp_path):
    write_folder(tmp_path / "text", valid=TEXT.encode() + b"\xff" + TEXT.encode())
    line = refused(tmp_path, "data.source=text", *SMALL)
    assert f"valid.txt: not valid UTF-8 at byte {len(TEXT)} " in line


def test_a_vocabulary_of_one(tmp_path):
    assert "data.vocab_size=1" in refused(tmp_path, "data.vocab_size=1")
    write_folder(tmp_path / "text")
    line = refused(tmp_path, "data.source=text", *SMALL, "data.min_frequency=1000000")
    assert "vocabulary" in line
    assert "min_frequency" in line


def test_an_output_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert "output_dir=file/run: cannot be made: Not a directory" in refused(tmp_path, "output_dir=file/run")


def test_an_output_directory_with_other_files(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    line = refused(tmp_path, "output_dir=home")
    assert "output_dir=home: holds other files (letter.txt) and is not a run directory" in line


def test_a_device_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # which may have read the variable before
    line = refused(tmp_path, "training.device=cuda")
    assert "training.device=cuda: host" in line
    assert "has 0 GPUs" in line


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a text and a finished run in `run`, checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    write_folder(folder / "text")
    done = hvd_train(folder, "data.source=text", "output_dir=run", *SMALL)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the finished run, to be damaged."""
    subprocess.run(["cp", "-a", f"{trained}/.", tmp_path], check=True)
    # Prepared data is known by its text's path and time: the copy is another text with the same tokens.
    return tmp_path


def test_a_run_with_another_configuration(run):
    line = refused(run, "data.source=text", "output_dir=run", *SMALL, "model.d_model=32")
    assert "model.d_model=32: the checkpoint" in line
    assert "was made with model.d_model=16" in line


def test_a_checkpoint_of_another_model(run):
    line = refused(
        run, "data.source=text", "output_dir=new", *SMALL, "model.num_layers=2", "checkpoint.resume=run"
    )  # fmt: skip
    assert "model.num_layers=2: the checkpoint" in line


def test_a_truncated_checkpoint_named_on_the_command_line(run):
    file = run / "run/checkpoints/step-00000004/model.safetensors"
    os.truncate(file, file.stat().st_size - 8)
    line = refused(run, "data.source=text", "output_dir=new", *SMALL, "checkpoint.resume=run/checkpoints/latest")
    assert "model.safetensors: truncated" in line


@pytest.mark.parametrize("damage", ["truncated", "bit", "pickle"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(run, damage):
    final = (run / "run/checkpoints/step-00000004/model.safetensors").read_bytes()
    folder = run / "run/checkpoints/step-00000004"
    file = folder / "model.safetensors"
    if damage == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "bit":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    else:
        (folder / "model.pt").write_bytes(pickle.dumps({"weights": 1}))
    done = hvd_train(run, "data.source=text", "output_dir=run", *SMALL, real=damage == "bit")
    assert done.returncode == 0, done.stderr
    wanted = {"truncated": "truncated: ", "bit": "is not the one in MANIFEST.json", "pickle": "never pickles"}[damage]
    assert wanted in done.stdout
    assert "set aside and the checkpoint before it is used" in done.stdout
    assert "after step 2 of 4" in done.stdout
    assert (run / "run/checkpoints/step-00000004/model.safetensors").read_bytes() == final
    assert (run / "run/checkpoints/step-00000004.damaged").is_dir()  # nothing is lost


def test_where_no_checkpoint_is_whole_nothing_changes(run):
    for step in (2, 4):
        (run / f"run/checkpoints/step-{step:08d}/state.json").write_text("{}")
    line = refused(run, "data.source=text", "output_dir=run", *SMALL)
    assert "state.json: " in line
    assert "no whole checkpoint is in run/checkpoints; move it away to start over" in line


def test_resume_never_keeps_the_earlier_run(run):
    line = refused(run, "data.source=text", "output_dir=run", *SMALL, "checkpoint.resume=never")
    assert "checkpoint.resume=never: run has checkpoints" in line


def test_launch_refuses_it_before_it_starts_a_rank_which_a_restart_would_let_resume(run):
    words = ["data.source=text", "output_dir=run", *SMALL, "checkpoint.resume=never"]
    done = command("hvd-transformer", "launch", "-np", "2", "--dry-run", "--", *words, folder=run)
    assert done.returncode == 2
    assert done.stderr.startswith("hvd-transformer: checkpoint.resume=never: run has checkpoints, which a new run")


def test_a_run_whose_text_is_gone_or_another(run):
    words = ["data.source=text", "output_dir=run", *SMALL, "training.max_steps=6"]
    (run / "text/train.txt").write_text(TEXT.upper())
    assert "trained on other data than data.source gives now" in refused(run, *words)
    (run / "text").rename(run / "moved")
    assert "data.source=text: no such file or folder" in refused(run, *words)


def test_a_full_disk_while_saving(tmp_path):
    """A real full disk: a file system with room for one checkpoint, not for the next beside it."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    write_folder(tmp_path / "text")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    try:
        wider = ["model.d_model=64", "model.d_feedforward=128", "checkpoint.keep_last=2", "checkpoint.keep_best=false"]
        done = hvd_train(tmp_path, "data.source=text", f"output_dir={disk / 'run'}", *SMALL, *wider, real=True)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "step 4: the last checkpoint could not be written, see the warnings above" in done.stderr
        assert "No space left on device" in done.stdout
        assert "training continues, and earlier checkpoints are kept" in done.stdout
        state = json.loads((disk / "run/checkpoints/latest/state.json").read_text())
        assert state["position"]["step"] == 2
        assert sorted(path.name for path in (disk / "run/checkpoints").iterdir()) == ["latest", "step-00000002"]
    finally:
        subprocess.run(["umount", disk], check=True)

"""A folder is taken only where it is ours, and a run goes on only where the configuration agrees; else all stays."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fragments import whole

from hvd_transformer import folder_lock
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER, CheckpointStore, Snapshot
from hvd_transformer.config import Config, load
from hvd_transformer.config.schema import flatten
from hvd_transformer.errors import UserError
from hvd_transformer.training.run_directory import RunDirectory


def config(folder: Path, *overrides: str) -> Config:
    return load("python-docs", overrides=[f"output_dir={folder}", *overrides])


def claim(made: Config) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and the warnings, of a start whose input is right."""
    warnings: list[str] = []
    directory = RunDirectory(made)
    checkpoint = directory.claim(made, warnings.append)
    directory.begin(made, rank=0, first_on_host=True)
    directory.release()
    return checkpoint, warnings


def refused(made: Config) -> str:
    with pytest.raises(UserError) as caught:
        claim(made)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def save(made: Config, step: int, best: bool = False, **state: Any) -> Path:
    tensors = {MODEL: whole({"w": torch.full([3], float(step))}), OPTIMIZER: whole({})}
    store = CheckpointStore(Path(made.output_dir) / "checkpoints", keep_last=5)
    return store.save(Snapshot(step, tensors, {"config": flatten(made), **state}, best))


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below, with what the files hold."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_new_folder_is_made_with_the_configuration_that_repeats_the_run(tmp_path: Path) -> None:
    made = config(tmp_path / "a" / "b", "seed=7")
    assert claim(made) == (None, [])
    assert load(file=tmp_path / "a" / "b" / "config.yaml") == made
    assert (tmp_path / "a" / "b" / "logs").is_dir()
    # Once more, as after a start that failed later.
    assert claim(made) == (None, [])


@pytest.mark.parametrize("found", ["nothing", "an empty folder", "a start", "a run"])
def test_a_start_that_is_refused_later_leaves_what_it_found(found: str, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    if found != "nothing":
        folder.mkdir(parents=True)
    if found in ("a start", "a run"):
        claim(config(folder))
    if found == "a run":
        save(config(folder), 10)
    before = contents(tmp_path)
    other = config(folder, "training.max_steps=9999")
    directory = RunDirectory(other)
    directory.claim(other, print)
    assert folder.is_dir()
    directory.abandon()
    assert contents(tmp_path) == before
    claim(other)  # it is free again


def test_the_root_of_a_mounted_file_system_is_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert claim(config(tmp_path)) == (None, [])


def test_a_new_folder_in_which_something_is_by_now_stays(tmp_path: Path) -> None:
    made = config(tmp_path / "a" / "b")
    directory = RunDirectory(made)
    directory.claim(made, print)
    (tmp_path / "a" / "letter.txt").write_text("dear")
    directory.abandon()
    assert contents(tmp_path) == {"a": None, "a/letter.txt": b"dear"}


def test_another_hosts_rank_makes_a_place_for_its_log_alone(tmp_path: Path) -> None:
    made = config(tmp_path / "a" / "b")
    RunDirectory(made).begin(made, rank=1, first_on_host=True)
    assert contents(tmp_path / "a" / "b") == {"logs": None}


def test_heartbeats_of_an_earlier_run_are_gone_before_this_one(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("rank-001.log", "beat-1", "beat-late", "beat-3.tmp"):
        (tmp_path / "logs" / name).touch()
    before = contents(tmp_path)
    RunDirectory(config(tmp_path)).begin(config(tmp_path), rank=2, first_on_host=False)
    assert contents(tmp_path) == before
    RunDirectory(config(tmp_path)).begin(config(tmp_path), rank=1, first_on_host=True)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-001.log"]


@pytest.mark.parametrize(
    "names",
    [
        [],
        [".gitkeep"],
        ["logs/rank-000.log"],
        ["logs/rank-000.log", "logs/beat-1", ".x.tmp"],
        ["logs/launch.log", "exit.json"],
    ],
)
def test_an_empty_folder_or_one_of_a_first_start_that_has_failed_is_taken(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert claim(config(tmp_path)) == (None, [])


@pytest.mark.parametrize("names", [["thesis.tex"], ["src/main.py", "tests/x.py"], ["checkpoints/step-1/model.pt"]])
def test_a_folder_of_something_else_is_left_as_it_is(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious")
    before = contents(tmp_path)
    message = refused(config(tmp_path))
    assert message.startswith(f"output_dir={tmp_path}: holds other files ({names[0].split('/')[0]})")
    assert contents(tmp_path) == before


def test_another_projects_logs_do_not_make_its_folder_ours(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "thesis.tex").write_text("precious")
    assert "holds other files" in refused(config(tmp_path))


@pytest.mark.parametrize("text", ["server: {port: 80}\n", "output_dir: there\nmodel: meta-llama\ntask: chat\n"])
def test_another_programs_config_yaml_is_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "app.py").write_text("precious")
    before = contents(tmp_path)
    refused(config(tmp_path))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["removed_key: 3\n", "optimizer: {name: sophia}\n"])
def test_a_run_of_another_version_with_other_keys_is_a_run(text: str, tmp_path: Path) -> None:
    made = config(tmp_path)
    claim(made)
    newest = save(made, 10)
    file = tmp_path / "config.yaml"
    file.write_text(f"{file.read_text().partition('optimizer:')[0]}{text}")
    assert claim(made) == (newest, [])
    assert load(file=file) == made


def test_whether_a_checkpoint_is_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = config(tmp_path / "old"), config(tmp_path / "new")
    checkpoint = save(old, 10)
    assert RunDirectory(old).holds(checkpoint) and not RunDirectory(new).holds(checkpoint)
    monkeypatch.chdir(tmp_path)
    assert RunDirectory(config(Path("old"))).holds(checkpoint)
    assert RunDirectory(old).holds(Path("old/checkpoints/best/../step-00000010"))


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    assert refused(config(tmp_path / "file")).startswith(f"output_dir={tmp_path}/file: cannot be made: ")
    assert refused(config(tmp_path / "file" / "below")).endswith("Not a directory")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        assert refused(config(tmp_path)) == f"output_dir={tmp_path}: cannot be written"
        assert "cannot be made: Permission denied" in refused(config(tmp_path / "below"))
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody can make folders")
def test_a_place_where_no_folder_can_be_made_is_told() -> None:
    assert refused(config(Path("/proc/hvd"))).startswith("output_dir=/proc/hvd: cannot be made: ")


def test_an_earlier_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    made = config(tmp_path)
    claim(made)
    save(made, 10, best=True)
    newest = save(made, 20)
    assert claim(made) == (newest, [])


def test_keys_of_speed_length_and_place_may_differ(tmp_path: Path) -> None:
    made = config(tmp_path)
    claim(made)
    newest = save(made, 10)
    words = ["training.batch_size=4", "training.accumulation=2", "training.max_steps=9999", "data.cache_dir=/x"]
    other = config(tmp_path, *words, "communication.bucket_mb=1", "checkpoint.keep_last=1", "training.device=cpu")
    assert claim(other) == (newest, [])
    assert load(file=tmp_path / "config.yaml") == other


@pytest.mark.parametrize(
    ("word", "here", "there"),
    [
        ("model.num_layers=5", "5", "4"),
        ("optimizer.lr=0.5", "0.5", "0.0015"),
        ("optimizer.clip_norm=none", "null", "1.0"),
        ("optimizer.betas=[0.5, 0.95]", "[0.5, 0.95]", "[0.9, 0.95]"),
        ("data.source=wikitext2", "wikitext2", "python-docs"),
        ("seed=2", "2", "1"),
        ("training.precision=bf16", "bf16", "fp32"),
    ],
)
def test_the_key_that_differs_is_named_with_both_values(word: str, here: str, there: str, tmp_path: Path) -> None:
    claim(config(tmp_path))
    newest = save(config(tmp_path), 10)
    before = contents(tmp_path)
    key = word.partition("=")[0]
    message = refused(config(tmp_path, word))
    assert message.startswith(f"{key}={here}: the checkpoint {newest} was made with {key}={there}; ")
    assert contents(tmp_path) == before


def test_the_number_of_columns_may_not_change_on_the_way(tmp_path: Path) -> None:
    made = config(tmp_path, "data.batching=columns")
    claim(made)
    save(made, 10)
    assert "training.batch_size" in refused(config(tmp_path, "data.batching=columns", "training.batch_size=16"))


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ([], ["training.batch_size=16"]),
        ([], ["training.batch_size=4", "training.accumulation=2"]),
        ([], ["data.batch_tokens=500"]),
        (["data.batch_tokens=400"], ["data.batch_tokens=500"]),
        (["data.batch_tokens=400"], ["data.batch_tokens=none"]),
    ],
)
def test_batches_may_be_cut_anew_only_where_an_epoch_begins(
    words: list[str], changed: list[str], tmp_path: Path
) -> None:
    """What remains of an epoch is a list of batches: others would have samples twice, or never."""

    def made(*more: str) -> Config:
        return load(overrides=[f"output_dir={tmp_path}", "task=classification", *words, *more])

    claim(made())
    save(made(), 10, position={"remaining": [[3, 9]]})
    message = refused(made(*changed))
    assert message.startswith(changed[0].replace("none", "null") + ": the checkpoint ")
    assert "until the end of the epoch" in message
    claim(made("training.eval_batch_size=3", "training.accumulation=3"))
    save(made(), 12, position={"remaining": None})
    claim(made(*changed))


def test_with_a_limit_of_tokens_the_batch_size_may_change(tmp_path: Path) -> None:
    made = load(overrides=[f"output_dir={tmp_path}", "task=classification", "data.batch_tokens=400"])
    claim(made)
    save(made, 10, position={"remaining": [[3, 9]]})
    claim(
        load(
            overrides=[
                f"output_dir={tmp_path}",
                "task=classification",
                "data.batch_tokens=400",
                "training.batch_size=3",
            ]
        )
    )


def test_never_refuses_a_folder_with_checkpoints_and_keeps_them(tmp_path: Path) -> None:
    made = config(tmp_path, "checkpoint.resume=never")
    assert claim(made) == (None, [])
    save(made, 10)
    before = contents(tmp_path)
    message = refused(made)
    assert message.startswith(f"checkpoint.resume=never: {tmp_path} has checkpoints")
    assert contents(tmp_path) == before


def test_a_run_may_start_from_another_ones_best(tmp_path: Path) -> None:
    old = config(tmp_path / "old")
    claim(old)
    best, newest = save(old, 10, best=True), save(old, 20)
    assert claim(config(tmp_path / "a", f"checkpoint.resume={tmp_path / 'old'}"))[0] == best
    new = config(tmp_path / "b", f"checkpoint.resume={newest}")
    assert claim(new)[0] == newest
    # Once it has checkpoints of its own, it goes on from those.
    own = save(new, 30)
    assert claim(new)[0] == own


def test_a_checkpoint_to_start_from_that_is_not_there_or_not_whole_is_told(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    message = refused(config(tmp_path / "new", f"checkpoint.resume={missing}"))
    assert message == f"{missing}: no such checkpoint folder"
    assert not list(tmp_path.iterdir())
    old = config(tmp_path / "old")
    claim(old)
    checkpoint = save(old, 10)
    (checkpoint / "state.json").unlink()
    message = refused(config(tmp_path / "new", f"checkpoint.resume={checkpoint}"))
    assert message == f"{checkpoint / 'state.json'}: missing"


def test_a_damaged_newest_is_reported_and_the_one_before_is_used(tmp_path: Path) -> None:
    made = config(tmp_path)
    claim(made)
    older, newest = save(made, 10), save(made, 20)
    (newest / MODEL).write_bytes((newest / MODEL).read_bytes()[:-1])
    checkpoint, (warning,) = claim(made)
    assert checkpoint == older
    assert f"{newest / MODEL}: truncated" in warning and "the checkpoint before it is used" in warning


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    made = config(tmp_path)
    claim(made)
    newest = save(made, 10)
    shutil.copytree(newest, newest.with_name(".saving-step-00000020-123"))
    assert claim(made)[0] == newest
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_two_jobs_cannot_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "END_SECONDS", 0.2)
    made = config(tmp_path)
    first = RunDirectory(made)
    assert first.claim(made, print) is None
    host = os.uname().nodename
    assert f"in use by hvd-train on host {host} (process {os.getpid()}, since " in refused(made)
    first.release()
    assert claim(made) == (None, [])


def test_a_job_whose_folder_was_taken_over_writes_no_more(tmp_path: Path) -> None:
    made = config(tmp_path)
    first = RunDirectory(made)
    first.claim(made, print)
    first.check()
    (tmp_path / ".lock").unlink()  # as after a long suspension
    second = RunDirectory(made)
    second.claim(made, print)
    with pytest.raises(UserError, match=r"^output_dir=.*: taken over by hvd-train on host .*; this job ends$"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_files_that_a_rank_cannot_append_to_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a run that root has trained, in folders that were given to the user."""
    directory = RunDirectory(load("tiny", overrides=[f"output_dir={tmp_path}"]))
    directory.check_files(0)
    (tmp_path / "logs").mkdir()
    for name in ("logs/rank-001.log", "metrics.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for rank, name in ((0, "metrics.jsonl"), (1, "logs/rank-001.log")):
        with pytest.raises(UserError, match=f"^output_dir={tmp_path}: {name} cannot be written$"):
            directory.check_files(rank)
    directory.check_files(2)  # has no log yet

"""What a snapshot holds is checked by running Python on it, apart from the folder that it was made of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.launch.horovodrun_command import launcher_environment
from hvd_transformer.plugin import CODE
from hvd_transformer.service.submitting import code_snapshot
from hvd_transformer.service.submitting.code_snapshot import collect, install, references, remove_unused, save


def write(folder: Path, **files: str) -> Path:
    """Files by path; two underscores stand for a slash, and the ending is .py."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def package(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").touch()


def names(folder: Path, reference: str) -> list[str]:
    return sorted(collect(folder, [("task", reference)]))


LOAD = """
from hvd_transformer.plugin import load_plugin
print(load_plugin("mine.task:make", "task", "function")())
"""


def loaded(folder: Path, code: Path | None) -> str:
    """What the user's function returns in a new process that runs in `folder`."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **({CODE: str(code)} if code else {})}
    done = subprocess.run([sys.executable, "-c", LOAD], cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout.strip() + done.stderr


def test_ranks_import_the_code_as_it_was_at_submit(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    package(folder, "mine")
    write(
        folder, mine__task="import helper\nfrom .part import N\ndef make(): return helper.TEXT, N", mine__part="N = 1"
    )
    write(folder, helper="TEXT = 'as submitted'")
    name = save(collect(folder, [("task", "mine.task:make")]), tmp_path / "store")
    write(folder, helper="TEXT = 'changed'", mine__part="N = 2")
    assert loaded(folder, None) == "('changed', 2)"
    code = install(tmp_path / "store" / name, tmp_path / "run")
    assert loaded(folder, code) == "('as submitted', 1)"
    assert code.parent == tmp_path / "run"
    assert code.name.startswith(".")  # a run directory may hold such names
    assert launcher_environment({CODE: str(code)}, [])[CODE] == str(code)  # so the ranks of all hosts get it


def test_only_what_is_imported_from_the_folder_is_kept(tmp_path: Path) -> None:
    write(
        tmp_path,
        task="import json, torch, used.deep\nfrom . import nothing\ndef f():\n    import late\nclass T: ...",
        used__deep="import used.other",
        used__other="",
        used__unused="",
        late="",
        unrelated="",
    )
    assert names(tmp_path, "task:T") == ["late.py", "task.py", "used/deep.py", "used/other.py"]


def test_of_a_package_every_file_is_kept(tmp_path: Path) -> None:
    package(tmp_path, "mine", "mine/sub")
    write(tmp_path, mine__task="class T: ...", mine__never_imported="", mine__sub__x="")
    (tmp_path / "mine" / "labels.json").write_text("[]")
    for unwanted in ("__pycache__/task.cpython-311.pyc", ".git/HEAD", "old.pyc", ".swap"):
        path = tmp_path / "mine" / unwanted
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert names(tmp_path, "mine.task:T") == [
        "mine/__init__.py", "mine/labels.json", "mine/never_imported.py", "mine/sub/__init__.py", "mine/sub/x.py",
        "mine/task.py",
    ]  # fmt: skip


def test_relative_imports_and_cycles(tmp_path: Path) -> None:
    write(tmp_path, a__b__task="from ..c import x\nfrom .d import y\nclass T: ...", a__c="import a.b.task", a__b__d="")
    assert names(tmp_path, "a.b.task:T") == ["a/b/d.py", "a/b/task.py", "a/c.py"]


def test_installed_code_is_not_kept(tmp_path: Path) -> None:
    assert collect(tmp_path, [("parallel.partition", "json.decoder:JSONDecoder")]) == {}
    package(tmp_path, "hvd_transformer")  # as in a checkout of this project
    write(tmp_path, task="import hvd_transformer\nclass T: ...")
    assert names(tmp_path, "task:T") == ["task.py"]
    (tmp_path / "json").mkdir()  # Python prefers an installed package to a folder without __init__.py
    assert collect(tmp_path, [("task", "json.decoder:JSONDecoder")]) == {}


@pytest.mark.parametrize(
    ("reference", "line"),
    [
        ("nowhere:T", "ModuleNotFoundError: No module named 'nowhere'"),
        ("good.nowhere:T", "ModuleNotFoundError: No module named 'good.nowhere'"),
        ("good:Missing", "AttributeError: module 'good' has no attribute 'Missing'"),
        ("broken:T", "SyntaxError: '(' was never closed (broken.py, line 1)"),
        ("...:T", "ModuleNotFoundError: No module named '...'"),
    ],
)
def test_what_cannot_be_imported_is_told_as_hvd_train_does(tmp_path: Path, reference: str, line: str) -> None:
    write(tmp_path, good="class T: ...", broken="class T(")
    with pytest.raises(UserError) as error:
        collect(tmp_path, [("task", reference)])
    assert str(error.value) == f"task={reference}: cannot be imported: {line}"


@pytest.mark.parametrize("text", ["T = f()", "from x import T", "from x import *", "import x as T", "def T(): ...",
    "def __getattr__(name): ...", "globals()['T'] = 1", "if 1:\n    class T: ...", "(T, S) = 1, 2"])  # fmt: skip
def test_names_that_a_module_may_have(tmp_path: Path, text: str) -> None:
    write(tmp_path, m=text)
    assert names(tmp_path, "m:T") == ["m.py"]


def test_a_module_that_is_imported_may_be_broken(tmp_path: Path) -> None:
    write(tmp_path, m="try:\n    import old\nexcept SyntaxError: ...\nclass T: ...", old="print 'x'")
    (tmp_path / "nul.py").write_bytes(b"\0")
    assert names(tmp_path, "m:T") == ["m.py", "old.py"]
    with pytest.raises(UserError, match="SyntaxError: .*null bytes"):
        collect(tmp_path, [("task", "nul:T")])


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "mine")
    write(tmp_path, mine__task="class T: ...")
    (tmp_path / "mine" / "data.bin").write_bytes(bytes(code_snapshot.MAX_BYTES))
    with pytest.raises(UserError, match=r"^task=mine.task:T: its modules.* at most 1,000 files of 10 MiB; keep data"):
        collect(tmp_path, [("task", "mine.task:T")])
    (tmp_path / "mine" / "data.bin").unlink()
    monkeypatch.setattr(code_snapshot, "MAX_FILES", 1)
    with pytest.raises(UserError, match="at most 1 files"):
        collect(tmp_path, [("task", "mine.task:T")])


def test_equal_code_is_one_snapshot(tmp_path: Path) -> None:
    files = {"a.py": b"1", "b/c.py": b"2"}
    name = save(files, tmp_path / "store")
    assert save(dict(reversed(files.items())), tmp_path / "store") == name
    assert save({"a.py": b"1", "b/c.py": b"3"}, tmp_path / "store") != name
    assert save({"a.py": b"1b/c.py", "c.py": b"2"}, tmp_path / "store") != name
    assert save({}, tmp_path / "store") == ""
    assert len(list((tmp_path / "store").iterdir())) == 3  # and nothing temporary
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


def test_an_earlier_snapshot_in_the_run_directory_is_replaced(tmp_path: Path) -> None:
    first, second = (save({name: b""}, tmp_path / "store") for name in ("a.py", "b/b.py"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    for snapshot, expected in ((first, "a.py"), (second, "b/b.py"), (second, "b/b.py")):
        code = install(tmp_path / "store" / snapshot, tmp_path / "run")
        assert [str(path.relative_to(code)) for path in code.rglob("*.py")] == [expected]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".code", "metrics.jsonl"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".code").symlink_to(elsewhere)
    install(tmp_path / "store" / first, tmp_path / "linked")
    assert (elsewhere / "kept").exists()
    with pytest.raises(UserError, match="missing; submit the job again"):
        install(tmp_path / "store" / "gone", tmp_path / "run")


def test_unused_snapshots_are_removed_but_not_new_ones(tmp_path: Path) -> None:
    used, unused, new = (save({name: b""}, tmp_path) for name in ("used", "unused", "new"))
    for name in (used, unused):
        os.utime(tmp_path / name, (1000, 1000))
    remove_unused(tmp_path, {used})
    assert {path.name for path in tmp_path.iterdir()} == {used, new}
    os.utime(tmp_path / new, (1000, 1000))
    save({"new": b""}, tmp_path)  # submitted again
    remove_unused(tmp_path, {used})
    assert {path.name for path in tmp_path.iterdir()} == {used, new}
    remove_unused(tmp_path / "absent", ())


def test_a_snapshot_that_is_found_again_while_it_is_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save({"a.py": b""}, tmp_path)
    os.utime(tmp_path / name, (1000, 1000))
    rename = Path.rename

    def rename_after_a_submit(path: Path, target: Path) -> Path:
        monkeypatch.undo()
        save({"a.py": b""}, tmp_path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_after_a_submit)
    remove_unused(tmp_path, ())
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_references() -> None:
    config = {"task": "m:T", "parallel.partition": [1, 2], "data.source": "a:b"}
    assert references(config) == [("task", "m:T")]
    assert references({"task": "translation", "parallel.partition": "p:f"}) == [("parallel.partition", "p:f")]

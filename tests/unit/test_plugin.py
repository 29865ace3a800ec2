"""Where the user's classes and ours are imported from."""

import sys
from pathlib import Path

import pytest

from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.plugin import load_plugin
from hvd_transformer.tasks.registry import task_class


def test_only_the_users_own_are_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_the_user.py").write_text("def cut(): ...")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "of_the_user", raising=False)
    task_class(load("python-docs"))
    assert "" not in sys.path
    assert load_plugin("of_the_user:cut", "parallel.partition", "function").__name__ == "cut"


def test_a_script_that_ends_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_a_script.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(UserError, match=r"^task=of_a_script:Task: cannot be imported: SystemExit: 2$"):
        load_plugin("of_a_script:Task", "task=of_a_script:Task", "Class")

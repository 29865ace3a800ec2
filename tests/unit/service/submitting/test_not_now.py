"""What may pass is told from what does not, and jobs rest longer and longer."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.submitting import not_now
from hvd_transformer.service.submitting.env_file import read_values
from hvd_transformer.service.submitting.not_now import (
    NotNow,
    SlowFolders,
    check_folder,
    check_run_folder,
    error_of,
    rest_seconds,
)


def test_a_folder_that_a_process_can_start_in(tmp_path: Path) -> None:
    check_folder(str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path / "away")
    for missing in (tmp_path / "away", tmp_path / "link"):
        with pytest.raises(NotNow, match=f"^{missing}: No such file or directory; the job starts in this folder$"):
            check_folder(str(missing))


def test_a_file_in_place_of_a_folder_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 1000)):
        with pytest.raises(UserError) as caught:
            check_folder(str(path))
        assert not isinstance(caught.value, NotNow)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *((code, NotNow) for code in (errno.ENOENT, errno.EACCES, errno.ENOTCONN, errno.ESTALE, errno.EROFS)),
        *((code, NotNow) for code in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE)),
        *((code, UserError) for code in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.E2BIG)),
    ],
)  # fmt: skip
def test_what_passes(code: int, kind: type[UserError]) -> None:
    error = error_of(OSError(code, os.strerror(code)), "words")
    assert (type(error), str(error)) == (kind, "words")


@pytest.mark.parametrize("below", [".", "1", "a/b"])
def test_a_link_whose_target_is_away_passes(tmp_path: Path, below: str) -> None:
    """It exists, so that no folder can be made in its place."""
    runs, scratch = tmp_path / "runs", tmp_path / "scratch"
    runs.symlink_to(scratch)
    with pytest.raises(NotNow, match=f"^{runs}: this symbolic link leads to a folder that does not exist$"):
        check_run_folder(runs / below)
    scratch.touch()
    with pytest.raises(UserError) as caught:
        check_run_folder(runs / below)
    assert not isinstance(caught.value, NotNow)
    scratch.unlink()
    scratch.mkdir()
    check_run_folder(runs / below)
    assert (scratch / below).parent.is_dir() and (scratch / below).is_dir() == (below == ".")  # nothing new is left


def test_nobody_waits_for_a_folder_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_now, "_ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(not_now, "_ANSWER_SECONDS_MEANWHILE", 20.0)
    folders, go, begun = SlowFolders(), threading.Event(), list[str]()
    hung, other = Path("/hung"), Path("/other")

    def hang() -> str:
        begun.append("hung")
        go.wait(60)
        return "late"

    began = time.monotonic()
    for _ in range(3):  # one thread is left behind, and asked no more
        with pytest.raises(NotNow, match="^/hung: does not answer$"):
            folders.ask(hung, hang)
        assert folders.ask(other, lambda: "at once") == "at once"
    assert begun == ["hung"] and time.monotonic() - began < 30
    go.set()
    (late,) = folders._looks.values()
    assert late.result(30) == "late"
    assert folders.ask(hung, lambda: "again") == "again"


def test_what_is_wrong_with_a_folder_that_answers_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotNow, match="No such file or directory"):
        SlowFolders().ask(tmp_path, lambda: check_folder(f"{tmp_path}/away"))


def test_a_private_file_that_is_away_may_come_back(tmp_path: Path) -> None:
    with pytest.raises(NotNow, match="values: cannot be read: No such file or directory$"):
        read_values(tmp_path / "values", ["A"], {os.geteuid()})
    for wrong in ("A", "B=1"):
        (tmp_path / "values").write_text(wrong)
        (tmp_path / "values").chmod(0o600)
        with pytest.raises(UserError) as caught:
            read_values(tmp_path / "values", ["A"], {os.geteuid()})
        assert not isinstance(caught.value, NotNow)


def test_jobs_rest_longer_and_longer_up_to_ten_minutes() -> None:
    assert [rest_seconds(tries) for tries in (1, 2, 3, 7, 8, 100_000)] == [10.0, 20.0, 40.0, 600.0, 600.0, 600.0]

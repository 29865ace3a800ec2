"""What may pass is told from what does not, and jobs rest longer and longer."""

import errno
import os
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.submitting.env_file import read_values
from hvd_transformer.service.submitting.not_now import NotNow, check_folder, error_of, rest_seconds


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

"""Files are the old or the new one, never half of either."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvd_transformer import atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writes_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic.write_text(path, "first: é\n")
    atomic.write_bytes(path, b"second")
    assert path.read_bytes() == b"second"
    assert names(tmp_path) == ["file"]
    atomic.write_text(path, "é\n")
    assert path.read_bytes() == "é\n".encode()


def test_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic.write_text(tmp_path / "file", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_the_longest_name_a_file_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    atomic.write_text(path, "x")
    assert path.read_text() == "x"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic.write_text(tmp_path / "none" / "file", "x")


def test_an_error_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "inside").touch()
    with pytest.raises(OSError):
        atomic.write_text(folder, "a file cannot replace a folder")
    assert names(tmp_path) == ["taken"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    program = """
import resource, signal, sys
from pathlib import Path
from hvd_transformer import atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    atomic.write_bytes(Path(sys.argv[1]), bytes(5000))
except OSError:
    print("raised")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "file"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "raised\n"
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    program = """
import sys
from pathlib import Path
from hvd_transformer import atomic
for number in range(10**9):
    atomic.write_bytes(Path(sys.argv[1]), bytes([number % 256]) * 200_000)
"""
    for delay in (0.0, 0.02, 0.05):
        writer = subprocess.Popen([sys.executable, "-c", program, path])
        while not path.exists():
            time.sleep(0.001)
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        data = path.read_bytes()
        assert len(data) == 200_000
        assert len(set(data)) == 1
        path.unlink()
    assert all(name.startswith(".") for name in names(tmp_path))


def test_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = [letter * 50_000 for letter in "abcd"]

    def write(text: str) -> None:
        for _ in range(10):
            atomic.write_text(path, text)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert names(tmp_path) == ["file"]

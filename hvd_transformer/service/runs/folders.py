"""Finds the run directories below a folder, again and again, looking only into folders that have changed."""

import os
import stat
import time
from collections import deque
from pathlib import Path

MARKS = ("config.yaml", "metrics.jsonl")  # what makes a folder a run directory
_DEPTH = 5  # levels below the folder
MOST_FOLDERS = 10_000  # that are looked at and are no runs
# A folder may change once more within the resolution of its time, and a host's clock may be behind that of the storage.
_SETTLED_SECONDS = 3.0


class _Folder:
    """A folder that is no run: its time when it was listed, and the folders in it."""

    def __init__(self, modified: int, settled: bool, inner: list[Path]) -> None:
        self.modified, self.settled, self.inner = modified, settled, inner


class FolderScan:
    """The run directories below `root`. Links are not followed, and names with a leading dot are left out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folders: dict[Path, _Folder] = {}
        self._runs: set[Path] = set()
        self.cut = False  # there are more folders than are looked at

    def find(self) -> set[Path]:
        """The run directories there are now. One `stat` per folder that is no run; none per run.

        Beyond the most folders no new runs are found, and those that are known get a `stat`.
        """
        seen: dict[Path, _Folder] = {}
        runs: set[Path] = set()
        cut = False
        left = deque([(self.root, 0)])
        while left:
            path, depth = left.popleft()
            if path in self._runs:
                runs.add(path)
                continue
            if len(seen) >= MOST_FOLDERS:
                cut = True
                runs.update(filter(_is_folder, self._runs - runs))
                break
            folder = self._look(path, runs)
            if folder is not None:
                seen[path] = folder
                if depth < _DEPTH:
                    left.extend((inner, depth + 1) for inner in folder.inner)
        self._folders, self._runs, self.cut = seen, runs, cut
        return runs

    def forget(self, run: Path) -> None:
        """Look again whether this folder is a run: it has been removed, or its files have."""
        self._runs.discard(run)

    def _look(self, path: Path, runs: set[Path]) -> _Folder | None:
        """The folder as it is now; None if it is a run, which is added to `runs`, or cannot be listed."""
        known = self._folders.get(path)
        try:
            modified = path.lstat().st_mtime_ns
            if known is not None and known.settled and known.modified == modified:
                return known
            settled = time.time() - modified / 1e9 > _SETTLED_SECONDS
            inner, marks = [], 0
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name in MARKS:
                        marks += entry.is_file(follow_symlinks=False)
                    elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                        inner.append(path / entry.name)
        except OSError:
            return None
        if marks == len(MARKS):
            runs.add(path)
            return None
        return _Folder(modified, settled, sorted(inner))


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False

"""The user's own code as it was at submit: the modules of the folder that task and parallel.partition need.

A snapshot is a folder STORE/DIGEST, named after its content, so the members of an array share one. A module is copied
with all modules that it imports from the folder; of a package every file, as it may read data that is beside its code.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from hvd_transformer.atomic import sync_folder
from hvd_transformer.errors import UserError
from hvd_transformer.own_folder import make_own_folder
from hvd_transformer.plugin import KEPT_CODE
from hvd_transformer.service.submitting.user_modules import UserModules, regular_files

MAX_BYTES = 10 << 20
MAX_FILES = 1000
_KEEP_SECONDS = 3600.0  # a snapshot without a job may belong to one that is just being submitted

Files = Mapping[str, bytes]


def references(config: Mapping[str, object]) -> list[tuple[str, str]]:
    """The settings that name the user's own code, each with its value; `config` is by dotted key."""
    return [
        (key, value)
        for key in ("task", "parallel.partition")
        if isinstance(value := config.get(key), str) and ":" in value
    ]


def collect(folder: Path, named: Sequence[tuple[str, str]]) -> dict[str, bytes]:
    """The files below `folder` that the `references` of a configuration need, by relative path.

    Empty if they are all installed. Raises `UserError` for a module that neither the folder nor this Python has, that
    is not valid or lacks the name, and for more than `MAX_BYTES` or `MAX_FILES`.
    """
    modules = UserModules(folder)
    files = _Files(folder)
    for key, value in named:
        origin = f"{key}={value}"
        module, _, name = value.partition(":")
        parts = tuple(module.split("."))
        if not modules.has_code(parts[:1]) and _is_installed(parts[0]):
            continue  # to find what is inside an installed package, it would have to be imported
        if modules.locate(parts) is None:
            raise UserError(f"{origin}: cannot be imported: ModuleNotFoundError: No module named '{module}'")
        modules.follow(parts)
        if (mistake := modules.mistakes.get(parts)) is not None:
            raise UserError(f"{origin}: cannot be imported: SyntaxError: {mistake}")
        if not modules.may_define(parts, name):
            raise UserError(
                f"{origin}: cannot be imported: AttributeError: module '{module}' has no attribute '{name}'"
            )
        for path in modules.files():
            files.add(origin, path)
    return files.content


def save(files: Files, store: Path) -> str:
    """Keep the files as a snapshot in the folder `store`; returns its name, "" if there are none. Raises `OSError`."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{len(name)} {len(data)} {name}".encode() + data)
    snapshot = store / digest.hexdigest()[:32]
    with suppress(FileNotFoundError):
        os.utime(snapshot)  # `remove_unused` leaves it alone
        return snapshot.name
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    _put(files, snapshot)
    return snapshot.name


def install(snapshot: Path, output_dir: Path) -> Path:
    """Copy a snapshot into a run directory, which all hosts see; returns the value of `HVD_TRANSFORMER_CODE`.

    Replaces what is there, so no rank may be running. Raises `UserError` if the snapshot is missing, and `OSError`.
    """
    if not snapshot.is_dir():
        raise UserError(f"{snapshot}: the snapshot of the job's code is missing; submit the job again")
    files = {str(path.relative_to(snapshot)): path.read_bytes() for path in regular_files(snapshot)}
    installed = output_dir / KEPT_CODE
    make_own_folder(output_dir)
    if installed.is_symlink() or installed.is_file():
        installed.unlink()
    elif installed.exists():
        shutil.rmtree(installed)
    _put(files, installed)
    return installed


def remove_unused(store: Path, used: Collection[str]) -> None:
    """Remove the snapshots that no job uses, but for new ones, whose job may be about to be added."""
    before = time.time() - _KEEP_SECONDS
    with suppress(FileNotFoundError):
        for path in store.iterdir():
            if path.name in used or path.lstat().st_mtime >= before:
                continue
            aside = path.with_name(f".{uuid4().hex}.tmp")
            path.rename(aside)  # from now on `save` makes a new one
            if aside.lstat().st_mtime < before:
                shutil.rmtree(aside, ignore_errors=True)
            elif not path.exists():  # `save` has just found it
                aside.rename(path)


def _put(files: Files, folder: Path) -> None:
    """Write the files to a new folder, which appears whole or not at all."""
    aside = folder.with_name(f".{uuid4().hex}.tmp")
    try:
        for name, data in files.items():
            path = aside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has just saved the same
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(folder.parent)


class _Files:
    """Files that are being copied, within limits."""

    def __init__(self, folder: Path) -> None:
        self.content: dict[str, bytes] = {}
        self._folder, self._bytes = folder, 0

    def add(self, origin: str, path: Path) -> None:
        """Raises `UserError`, which begins with `origin`."""
        name = str(path.relative_to(self._folder))
        if name in self.content:
            return
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise UserError(f"{origin}: {path}: cannot be read: {error.strerror}") from None
        self._bytes += len(data)
        if self._bytes > MAX_BYTES or len(self.content) == MAX_FILES:
            raise UserError(
                f"{origin}: its modules, and the files in their packages, are kept with the job, at most "
                f"{MAX_FILES:,} files of {MAX_BYTES >> 20} MiB; keep data and runs outside of the package of {path}"
            )
        self.content[name] = data


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ValueError, ImportError):
        return False

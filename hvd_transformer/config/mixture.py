"""The entries of `data.sources`: what is mixed, and in which proportions."""

import math
import re
from pathlib import PurePath
from typing import NamedTuple

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.errors import UserError

_KEYS = ("source", "weight", "epochs", "text_column")


class MixedSource(NamedTuple):
    """One source of a mixture; `config` reads it as the only source."""

    config: DataConfig
    weight: float | None
    epochs: float


def source_name(data: DataConfig) -> str:
    """The source, or the list of sources."""
    return data.source if data.sources is None else f"[{', '.join(str(entry['source']) for entry in data.sources)}]"


def origin(data: DataConfig) -> str:
    """The key with the source or sources, for messages."""
    return f"data.source{'' if data.sources is None else 's'}={source_name(data)}"


def mixed_sources(data: DataConfig) -> list[MixedSource]:
    """The entries of `data.sources`, as checked by `check_mixture`."""
    found = []
    for entry in data.sources or ():
        column = str(entry.get("text_column", data.text_column))
        own = data.model_copy(update={"source": str(entry["source"]), "sources": None, "text_column": column})
        weight = entry.get("weight")
        found.append(MixedSource(own, None if weight is None else float(weight), float(entry.get("epochs", 1))))
    return found


def source_names(data: DataConfig) -> list[str]:
    """A name for each entry of `data.sources`, for the keys of its metrics: the end of its path, of letters, digits and
    underscores, as long as it takes to tell it from the others. The same source twice gets numbers."""
    paths = [_words(str(entry["source"])) for entry in data.sources or ()]
    for depth in range(1, 1 + max(map(len, paths), default=0)):
        names = ["_".join(path[-depth:]) for path in paths]
        if len(set(names)) == len(names) and all(names):
            return names
    return [f"{'_'.join(path[-1:]) or 'source'}_{number}" for number, path in enumerate(paths, start=1)]


def _words(source: str) -> list[str]:
    """The parts of a path, without endings and the wildcards of a pattern."""
    path = PurePath(source)
    parts = [*path.parts[:-1], path.name.partition(".")[0]]
    return [word for part in parts if (word := re.sub(r"\W+", "_", part).strip("_"))]


def check_mixture(data: DataConfig) -> None:
    """Raise `UserError`, which names the entry and what is allowed."""
    if data.sources is None:
        return
    if data.source != (default := type(data).model_fields["source"].default):
        raise UserError(f"data.source={data.source}: not with data.sources; leave it at {default}")
    if data.batching == "columns":
        raise UserError("data.sources: not with data.batching=columns, which reads one text in order; use windows")
    for number, entry in enumerate(data.sources, start=1):
        _check_entry(entry, f"data.sources, entry {number}")
    weights = [source.weight for source in mixed_sources(data)]
    if None in weights and any(weight is not None for weight in weights):
        raise UserError(
            f"data.sources, entry {weights.index(None) + 1}: has no weight, as others have; give each a weight, or none"
        )
    if not any(weight is None or weight for weight in weights):
        raise UserError("data.sources: all weights are 0; at least one must be above 0")


def _check_entry(entry: dict[str, float | str], place: str) -> None:
    for key in entry:
        if key not in _KEYS:
            raise UserError(f"{place}: unknown key {key}; an entry has {', '.join(_KEYS)}")
    for key in ("source", "text_column"):
        value = entry.get(key, "" if key == "source" else "text")
        if not isinstance(value, str) or not value:
            wrong = f"{key}={value} must be a text" if key in entry else f"has no {key}"
            raise UserError(f"{place}: {wrong}; an entry is a table such as {{source: a.jsonl, weight: 0.7}}")
    for key, least in (("weight", "of at least 0"), ("epochs", "above 0")):
        value = entry.get(key, 1.0)
        try:
            number = float(value)  # YAML reads 1e-1 as text
        except ValueError:
            number = math.nan
        if not (0 < number < math.inf or (number == 0 and key == "weight")):
            raise UserError(f"{place} ({entry['source']}): {key}={value}: must be a number {least}")

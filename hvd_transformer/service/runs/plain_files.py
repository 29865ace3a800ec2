"""Reads files of run directories, which anybody may have made: never through a link, never a pipe, up to a limit."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import yaml

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MOST_JSON_BYTES = 4 << 20
_MOST_YAML_BYTES = 256 << 10
# libyaml's loader recurses in C without a limit. A level of nesting takes at least one of these characters.
_YAML_NESTING, _MOST_NESTING = b"[{-:?", 5000
_MOST_NODES = 10_000  # of a configuration, each alias counted as often as it is used
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has it


def open_plain(path: Path) -> int:
    """A descriptor of the regular file at an absolute path. Raises `OSError`, also if any part of it is a link.

    The path of a run is resolved when the run is found; what is a link now was put there since, or lies in the run.
    """
    folder = open_folder(path.parent)
    try:
        file = os.open(path.name, _FLAGS, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path}: not a regular file")
    return file


def open_folder(path: Path) -> int:
    """A descriptor of the folder at an absolute path. Raises `OSError`, also if any part of it is a link."""
    folder = os.open("/", _FLAGS | os.O_DIRECTORY)
    for part in path.parts[1:]:
        try:
            inner = os.open(part, _FLAGS | os.O_DIRECTORY, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def list_folder(path: Path) -> list[str]:
    """The names in a folder. Raises `OSError`, also if any part of its path is a link."""
    folder = open_folder(path)
    try:
        return os.listdir(folder)  # noqa: PTH208 - of a descriptor
    finally:
        os.close(folder)


def read_plain(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises `OSError`."""
    file = open_plain(path)
    try:
        if os.fstat(file).st_size > limit:
            raise OSError(f"{path}: larger than {limit} bytes")
        parts = []
        while limit > 0 and (part := os.read(file, limit)):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    finally:
        os.close(file)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none, if it is not readable, or not an object."""
    try:
        found = json.loads(read_plain(path, _MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_config(path: Path) -> dict[str, Any]:
    """A configuration by dotted key, from the YAML file that a run keeps of it; empty if it is not readable."""
    try:
        data = read_plain(path, _MOST_YAML_BYTES)
        if sum(map(data.count, (bytes([character]) for character in _YAML_NESTING))) > _MOST_NESTING:
            return {}
        found = yaml.load(data, Loader=_LOADER)  # noqa: S506 - a safe loader
    except Exception:  # what PyYAML raises depends on the tag: `!!bool maybe` is a KeyError
        return {}
    flat: dict[str, Any] = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, dict) and value:
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[str(name)] = value
    try:
        _count(flat, _MOST_NODES)
        return {plain(key): plain(value) for key, value in flat.items()}
    except (ValueError, RecursionError):
        return {}


def _count(value: Any, left: int) -> int:
    """How many more nodes are allowed after this value. Raises `ValueError` if there are too many.

    Aliases make a short YAML text a huge tree, and one that contains itself.
    """
    left -= 1
    if left < 0:
        raise ValueError
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | set | tuple):  # tuples: keys, and the items of `!!pairs`
        for inner in value:
            left = _count(inner, left)
    return left


def plain(value: Any) -> Any:
    """The value as JSON has it: YAML knows dates, sets and keys that are no text, Python NaN and half characters."""
    if isinstance(value, str):
        return value if value.isprintable() else value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | set | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return plain(str(value))

"""Arrays: from --array KEY=V1,V2 to the settings of each job, the product of all of them."""

from collections.abc import Sequence
from itertools import product

from hvd_transformer.errors import UserError

MAX_JOBS = 1000
_OPENING, _CLOSING = "[{(", "]})"


def expand(array: Sequence[str]) -> list[list[str]]:
    """The KEY=VALUE words of each job; the last option varies fastest. One job without settings for no options.

    Raises `UserError` for a malformed option, a key that is given twice, and more than `MAX_JOBS`.
    """
    choices, number = [], 1
    keys: set[str] = set()
    for option in array:
        key, values = _parse(option)
        if key in keys:
            raise UserError(f"--array {option}: {key} is given twice")
        keys.add(key)
        number *= len(values)
        if number > MAX_JOBS:
            raise UserError(f"--array {option}: makes more than {MAX_JOBS:,} jobs")
        choices.append([f"{key}={value}" for value in values])
    return [list(words) for words in product(*choices)]


def _parse(option: str) -> tuple[str, list[str]]:
    key, equals, text = option.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--array {option}: not of the form KEY=VALUE,VALUE, such as seed=1,2,3")
    if key == "output_dir":
        raise UserError(f"--array {option}: each job of an array has a run directory of its own already")
    values = [value.strip() for value in _split(text)]
    if "" in values:
        raise UserError(f"--array {option}: has an empty value")
    if len(set(values)) < len(values):
        raise UserError(f"--array {option}: has the same value twice")
    return key, values


def _split(text: str) -> list[str]:
    """The values: split at commas, but not within a list or a table, such as [5, 4, 5], nor within quotes there."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif depth and character in "\"'":
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth = max(0, depth - 1)
        elif character == "," and not depth:
            values.append("")
            continue
        values[-1] += character
    return values

"""What the keys of all sections are made of: how a key is declared, and types that several sections use."""

from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hvd_transformer.config.strict_yaml import NONE_WORDS, QuotedText

# Of whole numbers: far more than any job needs, and few enough for a sum of them in 64 bits.
LARGEST = 10**12


def _key(may_change: bool, default: Any, description: str, *, allowed: str | None = None, **limits: Any) -> Any:
    """One key: its default, its description in `--help`, its range.

    `may_change`: a run may resume from a checkpoint in which this key differs. `allowed`: what a list, a table or a
    union may be, for messages; pydantic's messages name only one of the alternatives.
    """
    extra: dict[str, Any] = {"may_change": may_change, "allowed": allowed}
    if isinstance(default, int) and "ge" in limits and "lt" not in limits:
        limits.setdefault("le", LARGEST)
    return Field(default, description=description, json_schema_extra=extra, **limits)


# A resumed run must agree with its checkpoint in the fixed keys.
fixed, changeable = partial(_key, False), partial(_key, True)


def none_word(value: Any) -> Any:
    """None for a word that means it."""
    return None if isinstance(value, str) and value.lower() in NONE_WORDS else value


def _unquoted_none(value: Any) -> Any:
    """Like `none_word`, for names: in quotes the word is one."""
    return value if isinstance(value, QuotedText) else none_word(value)


# On the command line every value is a word: `training.max_steps=none` means no limit.
OptionalCount = Annotated[Annotated[int, Field(ge=1, le=LARGEST)] | None, BeforeValidator(none_word)]
OptionalPositive = Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(none_word)]
OptionalName = Annotated[Annotated[str, Field(min_length=1)] | None, BeforeValidator(_unquoted_none)]


class Section(BaseModel):
    # In YAML a label or a folder name may look like a number; it is the text that was written (`strict_yaml`).
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)

"""Loads the configuration of a job: defaults < preset < file < KEY=VALUE.

Every invalid value raises a `UserError`, which names the key, where it was set and what is allowed.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from hvd_transformer.config import strict_yaml
from hvd_transformer.config.checks import check
from hvd_transformer.config.families import with_own_blocks
from hvd_transformer.config.schema import KEYS, SECTIONS, Config, allowed, field, may_change, shown
from hvd_transformer.errors import UserError

PRESETS = resources.files("hvd_transformer.config") / "presets"


def preset_names() -> list[str]:
    """The names that `--preset` accepts."""
    return sorted(item.name.removesuffix(".yaml") for item in PRESETS.iterdir() if item.name.endswith(".yaml"))


def preset_summary(name: str) -> str:
    """The first comment line of a preset's file."""
    return (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def load(
    preset: str | None = None, file: Path | None = None, overrides: Sequence[str] = (), origin: str = "command line"
) -> Config:
    """The validated configuration. `overrides` are "KEY=VALUE" words with dotted keys, from `origin`.

    Raises `UserError`.
    """
    settings = _Settings()
    if preset is not None:
        if preset not in (names := preset_names()):
            raise UserError(f"--preset {preset}: no such preset{_nearest(preset, names)} (presets: {', '.join(names)})")
        settings.add_text((PRESETS / f"{preset}.yaml").read_text(encoding="utf-8"), f"preset {preset}")
    if file is not None:
        try:
            settings.add_text(file.read_text(encoding="utf-8"), str(file))
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not valid UTF-8 at byte {error.start}") from None
    for word in overrides:
        settings.add_word(word, origin)
    settings.check_homes()
    return settings.build(of_folder=True)


def load_again(
    values: Mapping[str, Any], origin: str, overrides: Sequence[str] = (), free: Collection[str] = ()
) -> Config:
    """The validated configuration of a checkpoint (`values`, by dotted key) with "KEY=VALUE" words applied.

    Raises `UserError`, also for a word that sets a key which must not change, unless it is one of `free`.
    """
    settings = _Settings()
    for key, value in values.items():  # of JSON, where no value is null and "none" a name
        settings.add(key, strict_yaml.QuotedText(value) if isinstance(value, str) else value, origin)
    for word in overrides:
        settings.add_word(word)
        key = word.partition("=")[0].strip()
        if not (key in free or may_change(key)):
            raise UserError(f"{word}: {key} is fixed by the checkpoint, {key}={values.get(key)}, and cannot be changed")
    settings.check_homes(but=origin)  # its folders may be those of another machine
    return settings.build()


def check_words(overrides: Sequence[str]) -> None:
    """Raise `UserError` for a "KEY=VALUE" word that is invalid whatever the other settings are."""
    settings = _Settings()
    for word in overrides:
        settings.add_word(word)
    settings.validated()


def dump(config: Config) -> str:
    """The configuration as YAML, which `load(file=…)` turns back into the same configuration."""
    return strict_yaml.dump(config.model_dump(mode="json"))


class _Settings:
    """Settings collected so far, by dotted key, each with the place where it was set."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def add_text(self, text: str, origin: str) -> None:
        try:
            content = strict_yaml.parse(text)
        except ValueError as error:  # PyYAML's, of a value such as the date 2020-13-45
            raise UserError(f"{origin}: not valid YAML: {error}") from None
        except yaml.YAMLError as error:
            if isinstance(error, yaml.reader.ReaderError):  # a character that YAML does not allow
                line, problem = text.count("\n", 0, error.position) + 1, error.reason
            else:
                mark = getattr(error, "problem_mark", None)
                line, problem = (
                    mark.line + 1 if mark else 1,
                    getattr(error, "problem", None) or str(error).splitlines()[0],
                )
            raise UserError(f"{origin}, line {line}: not valid YAML: {problem}") from None
        if content is None:
            return
        if not isinstance(content, dict):
            raise UserError(f"{origin}: must contain keys and values, such as 'model:' with 'num_layers: 4' below it")
        own: list[tuple[str, Any]] = []
        for name, value in content.items():
            if name in SECTIONS:
                if not isinstance(value, dict):
                    raise UserError(f"{origin}: {name} must contain keys and values, not {shown(value)}")
                own += ((f"{name}.{key}", inner) for key, inner in value.items())
            else:
                own.append((str(name), value))
        for key, value in own:
            if [other for other, _ in own].count(key) > 1:
                raise UserError(f"{origin}: {shown(key)} is set twice, as a dotted key and in its section")
            self.add(key, value, origin)

    def add_word(self, word: str, origin: str = "command line") -> None:
        key, equals, value = word.partition("=")
        if not equals and word.endswith("hvd-train"):
            raise UserError(f"{shown(word)}: leave it out; only its arguments belong here")
        if not equals or not key.strip():
            raise UserError(f"{shown(word)}: not of the form KEY=VALUE, such as training.max_steps=50")
        parsed: Any = value
        if value.startswith(("[", "{")):
            try:
                parsed = strict_yaml.parse(value)
            except (yaml.YAMLError, ValueError):
                raise UserError(f"{word}: the value is not a valid list") from None
        self.add(key.strip(), parsed, origin)

    def add(self, key: str, value: Any, origin: str) -> None:
        if key in SECTIONS:
            own = [known for known in KEYS if known.startswith(f"{key}.")]
            raise UserError(f"{key} ({origin}): a section of the configuration; its keys are {', '.join(own)}")
        if key not in KEYS:
            raise UserError(f"{shown(key)} ({origin}): unknown key{_nearest(key, KEYS)}")
        given = f"{key}={shown(value)} ({origin})"
        kind = field(key).annotation
        if _has_bool(value) and bool not in (kind, *get_args(kind)):  # pydantic would read it as 0 or 1
            raise UserError(f"{given}: must not be true or false, nor yes or no, unless in quotes")
        if not isinstance(value, _PLAIN):  # a date, for example
            raise UserError(f"{given}: must be text, a number, a list or a table; put text in quotes")
        if isinstance(value, str) and any(character < " " for character in value):
            raise UserError(f"{given}: must not contain line breaks or other control characters")
        self.values[key] = value
        self.origins[key] = origin

    def check_homes(self, but: str | None = None) -> None:
        """Raise `UserError` for a folder ~name of a user whom this machine does not know."""
        for key in _FOLDERS & self.values.keys():
            if self.origins[key] != but:
                value = self.values[key]
                paths = _sources(value) if key == "data.sources" else [str(value)]
                try:
                    for path in paths:
                        Path(path).expanduser()
                except RuntimeError:
                    given = f"{key}={shown(self.values[key])} ({self.origins[key]})"
                    raise UserError(
                        f"{given}: must be a full path, as this machine knows no such home folder"
                    ) from None

    def build(self, *, of_folder: bool = False) -> Config:
        """`of_folder`: the folder of `model.pretrained` says what the other keys of `model` are."""
        config = self.validated()
        if of_folder:
            config = with_own_blocks(config)
        check(config)
        return config

    def validated(self) -> Config:
        """Validate each value by itself."""
        nested: dict[str, Any] = {}
        for key, value in self.values.items():
            section, _, name = key.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = value
        try:
            return Config.model_validate(nested)
        except ValidationError as error:
            first = error.errors()[0]
            path = [str(part) for part in first["loc"]]
            key = next(key for key in (".".join(path[:2]), path[0]) if key in KEYS)
            given = f"{key}={shown(self.values[key])} ({self.origins[key]})"
            raise UserError(f"{given}: must {_wanted(key, first['type'], first['msg'])}") from None


_FOLDERS = {
    "output_dir", "data.source", "data.sources", "data.tokenizer", "data.cache_dir", "checkpoint.resume",
    "model.pretrained",
}  # fmt: skip
_PLAIN = (str, int, float, list, dict, type(None))
# By pydantic's error type: what the value must be, where pydantic's message does not say it to a user.
_IN_WORDS = {"bool_parsing": "be true or false", "bool_type": "be true or false", "string_type": "be text"}


def _sources(value: Any) -> list[str]:
    entries = value if isinstance(value, list) else []
    return [str(entry.get("source", "")) for entry in entries if isinstance(entry, dict)]


def _wanted(key: str, kind: str, message: str) -> str:
    """What the value must be: in the schema's words, otherwise in those for this kind of error, or in pydantic's."""
    if in_words := allowed(key):
        return f"be {in_words}"
    wanted = _IN_WORDS.get(kind) or (message.partition(" should ")[2] or message).partition(", unable")[0]
    return f"{wanted}, or none" if type(None) in get_args(field(key).annotation) else wanted


def _has_bool(value: Any) -> bool:
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return any(isinstance(part, bool) or (isinstance(part, (dict, list)) and _has_bool(part)) for part in parts)


def _nearest(word: str, known: Sequence[str]) -> str:
    """ ", did you mean …?": the same last part in another section, otherwise a similar key; empty if there is none."""
    last = word.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    near = (
        difflib.get_close_matches(word, same, n=1, cutoff=0.85)  # several, but the section is only misspelt
        or same
        or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    )
    if not near:
        leaves = {key.rpartition(".")[2]: key for key in known}
        leaf = difflib.get_close_matches(last, list(leaves), n=1, cutoff=0.7)
        near = [leaves[name] for name in leaf]
    return f", did you mean {' or '.join(near)}?" if near else ""

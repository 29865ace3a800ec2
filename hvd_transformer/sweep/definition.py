"""A sweep's file: parameters, metric, number of trials, ranks, early stopping. Wrong files are refused in one line."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvd_transformer.config import strict_yaml
from hvd_transformer.config.schema import KEYS, shown
from hvd_transformer.errors import UserError

MAX_TRIALS = 1000
_RANGE = "a list of values, or a range such as {min: 1e-4, max: 1e-1, scale: log}"
_ALLOWED = {
    "preset": "the name of a preset",
    "config": "a YAML file with settings",
    "settings": "keys and values, such as {training.device: cpu}",
    "parameters": f"keys, each with {_RANGE}",
    "method": "grid, random or optuna",
    "trials": f"a number from 1 to {MAX_TRIALS}",
    "seed": "a number from 0 on",
    "metric": "train_loss, or a metric of the validation split such as valid_loss",
    "direction": "minimize or maximize",
    "ranks": "a number from 1 on",
    "launch": "options of hvd-transformer launch, such as '-H h1:4,h2:4'",
    "halving": "steps and factor, such as {steps: [100, 300, 900], factor: 3}, the steps growing and factor above 1",
    "output_dir": "a folder",
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Range(_Part):
    """Numbers between two limits, inclusive; whole ones if both limits are."""

    min: int | float
    max: int | float
    scale: Literal["linear", "log"] = "linear"

    @property
    def whole(self) -> bool:
        return isinstance(self.min, int) and isinstance(self.max, int)


class Halving(_Part):
    """Successive halving: after each of `steps`, one of `factor` trials goes on to the next."""

    steps: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2)]
    factor: int = Field(3, ge=2)


Choices = Annotated[list[Any], Field(min_length=1)]


class Sweep(_Part):
    """The content of a sweep's file."""

    preset: str | None = None
    config: str | None = None
    settings: dict[str, Any] = {}
    parameters: Annotated[dict[str, Range | Choices], Field(min_length=1)]
    method: Literal["grid", "random", "optuna"] = "grid"
    trials: int | None = Field(None, ge=1, le=MAX_TRIALS)
    seed: int = Field(1, ge=0)
    metric: str = Field("valid_loss", pattern=r"^(train_loss|valid_.+)$")
    direction: Literal["minimize", "maximize"] | None = None
    ranks: int = Field(1, ge=1)
    launch: str = ""
    halving: Halving | None = None
    output_dir: str | None = None

    @property
    def sign(self) -> float:
        """Times the metric: lower is better."""
        lower = self.direction == "minimize" or (
            self.direction is None and self.metric.endswith(("loss", "perplexity"))
        )
        return 1.0 if lower else -1.0

    @property
    def rungs(self) -> list[int | None]:
        """training.max_steps of each rung; None: that of the settings."""
        return [None] if self.halving is None else list(self.halving.steps)

    def settings_of(self, values: dict[str, Any], max_steps: int | None = None) -> list[str]:
        """KEY=VALUE of a trial with these values of the parameters."""
        found = self.settings | values
        if max_steps is not None and self.halving is not None:
            # The steps of the rungs, not the preset's epochs, say how long a trial trains; an epoch has one or more.
            found = {"training.epochs": self.halving.steps[-1]} | found | {"training.max_steps": max_steps}
        return [f"{key}={_word(value)}" for key, value in found.items()]

    def words(self, values: dict[str, Any], max_steps: int | None = None) -> list[str]:
        """The arguments of hvd-train for such a trial."""
        base = (["--preset", self.preset] if self.preset else []) + (["--config", self.config] if self.config else [])
        return [*base, *self.settings_of(values, max_steps)]


def read_sweep(file: Path) -> Sweep:
    """The sweep of a file. Raises `UserError`, which names the key and what is allowed."""
    try:
        content = strict_yaml.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not valid UTF-8 at byte {error.start}") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise UserError(f"{file}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: must contain keys and values; its keys are {', '.join(_ALLOWED)}")
    try:  # as sweep.json holds it: a date of YAML becomes text
        content = json.loads(json.dumps(content, default=str))
    except TypeError:
        raise UserError(f"{file}: its keys must be text") from None
    for name in content:
        if name not in _ALLOWED:
            raise UserError(f"{file}: {name}: unknown key; the keys are {', '.join(_ALLOWED)}")
    if "parameters" not in content:
        raise UserError(f"{file}: parameters: missing; must be {_ALLOWED['parameters']}")
    try:
        sweep = Sweep.model_validate(content)
    except ValidationError as error:
        place = error.errors()[0]["loc"]
        name = str(place[0])
        if name == "parameters" and len(place) > 1:
            given = content["parameters"][place[1]]
            raise UserError(f"{file}: parameters: {place[1]}: {shown(given)}: must be {_RANGE}") from None
        raise UserError(f"{file}: {name}: {shown(content[name])}: must be {_ALLOWED[name]}") from None
    _check(sweep, file)
    return sweep


def _word(value: Any) -> str:
    """A value as hvd-train reads it from its command line: YAML, in which texts of a list or a table need quotes."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else shown(value)


def _check(sweep: Sweep, file: Path) -> None:
    """Raise `UserError` for paths that cannot be, and for keys that do not fit together."""
    for name, path in (("config", sweep.config), ("output_dir", sweep.output_dir)):
        try:
            possible = path is None or (Path(path).expanduser() and "\0" not in path)
        except RuntimeError:  # ~ of a user whom nobody knows
            possible = False
        if not possible:
            raise UserError(f"{file}: {name}: {shown(path)}: must be {_ALLOWED[name]}")
    try:
        shlex.split(sweep.launch)
    except ValueError as error:
        raise UserError(f"{file}: launch: {sweep.launch}: {error}") from None
    for section in ("parameters", "settings"):
        for key in getattr(sweep, section):
            if key in ("output_dir", "checkpoint.resume") or (sweep.halving and key == "training.max_steps"):
                raise UserError(f"{file}: {section}: {key}: the sweep sets it")
    for key, values in sweep.parameters.items():
        where = f"{file}: parameters: {key}"
        if key not in KEYS:
            raise UserError(f"{where}: no key of hvd-train; see hvd-train --help")
        if key in sweep.settings:
            raise UserError(f"{where}: is in settings, too; it belongs in one of them")
        if isinstance(values, Range):
            if sweep.method == "grid":
                raise UserError(f"{where}: a range, of which method=grid has no values; use a list, or method: random")
            if not values.min < values.max or (values.scale == "log" and values.min <= 0):
                raise UserError(f"{where}: min must be below max, and with scale=log above 0")
    if sweep.method == "grid" and sweep.trials is not None:
        raise UserError(f"{file}: trials: not with method=grid, which tries all combinations")
    if sweep.method != "grid" and sweep.trials is None:
        raise UserError(f"{file}: trials: missing; must be {_ALLOWED['trials']}")
    if sweep.halving is not None:
        steps = sweep.halving.steps
        if sorted(set(steps)) != steps:
            raise UserError(f"{file}: halving: {shown(steps)}: must be {_ALLOWED['halving']}")
        if sweep.method == "optuna":
            raise UserError(f"{file}: halving: not with method=optuna, which learns from whole trials; use random")

"""Options that several commands share, and what commands that use a trained model have in common."""

import io
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from hvd_transformer.cli import completion
from hvd_transformer.errors import UserError
from hvd_transformer.launch.time_limits import MANY_HOSTS

if TYPE_CHECKING:
    from hvd_transformer.inference.trained_model import Trained

F = TypeVar("F", bound=Callable[..., Any])


class _Path(click.Path):
    """A path; ~ and ~user stand for home folders."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            return path.expanduser()
        except RuntimeError:
            self.fail(f"{path}: this machine knows no such home folder.", param, ctx)


PATH = _Path(path_type=Path)


class Text(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """Text in UTF-8, which a command line need not be."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from hvd_transformer.data.text_files import is_text

        if not is_text(str(value)):
            self.fail(f"{value!r} is not valid UTF-8.", param, ctx)
        return str(value)


class FiniteRange(click.FloatRange):
    """A range of finite numbers: rejects nan, and infinity even where the range is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Seconds(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A duration above zero: 90, 90s, 30m or 2h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value))
        if found is None or not float(found[1]):
            self.fail(f"{value!r} is not a duration above zero, such as 90s, 30m or 2h.", param, ctx)
        return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


class WithJobArguments(click.Command):
    """A command whose arguments after `--` are those of hvd-train."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises `click.UsageError` that tells of the `--`, if an option of hvd-train stands before it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in ("--preset", "--config"):
                raise
            raise click.UsageError(
                f"{error.option_name} is an option of hvd-train: write it after --, as in "
                f"'{ctx.command_path} … -- {error.option_name} …'",
                ctx,
            ) from error


# The configuration of a job: hvd-train, plan, prepare.
config_file = click.option("--config", "file", type=PATH, metavar="FILE", help="YAML file with settings.")
preset = click.option(
    "--preset",
    metavar="NAME",
    help="Settings that ship with the package; `hvd-train --help` lists them.",
    shell_complete=completion.presets,
)
settings = click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=completion.settings)

# The hosts of a job: launch, doctor.
hosts = click.option(
    "-H", "hosts", metavar="HOST:SLOTS,…", help="Hosts, such as h1:2,h2:2 or node[01-08]:4. Default: localhost."
)
hostfile = click.option("--hostfile", type=PATH, metavar="FILE", help="File with one host per line.")
ssh_port = click.option("--ssh-port", type=int, metavar="N", help="ssh port of all hosts.")
ssh_identity = click.option("--ssh-identity", type=PATH, metavar="FILE", help="Private key for ssh.")
network_interface = click.option(
    "--network-interface", metavar="NAME", help="Interface to use, such as eth0. Default: one that all hosts share."
)


def timeout(name: str, help_text: str) -> Callable[[F], F]:
    """An option for a limit of `launch` (`TimeLimits`), which grows with the number of hosts unless it is given."""
    return click.option(name, type=Seconds(), metavar="TIME", help=f"{help_text}, and longer above {MANY_HOSTS} hosts.")


def passed_on(context: click.Context, *, without: Collection[str]) -> list[str]:
    """The options on a command line as words for another one, but for those of the parameters `without`."""
    words: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in without or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for item in value if parameter.multiple else [value]:
                words += [parameter.opts[0], str(item)]
    return words


# A trained model: classify, evaluate, export, generate, translate.
checkpoint = click.argument("checkpoint", type=PATH)
device = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU if there is one.",
)
batch_size = click.option(
    "--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Lines per batch, of similar length."
)
text_file = click.option(
    "--file", type=PATH, metavar="FILE", help="File with one text per line. Default: standard input."
)


def check_checkpoint(path: Path) -> None:
    """Raise `UserError` if `path` cannot be a checkpoint; runs before torch is imported, which takes seconds."""
    marks = ("checkpoints", "MANIFEST.json", "config.json", "adapter_config.json")
    try:
        if not path.is_dir():
            raise UserError(f"{path}: no such checkpoint folder")
        known = any((path / name).exists() for name in marks)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not known:
        raise UserError(f"{path}: neither a run directory nor a checkpoint nor an exported folder")


def load_model(checkpoint: Path, task: str, device: str) -> "Trained":
    """The model of a checkpoint of `task` on the device of `--device`. Raises `UserError`.

    From here on the output is UTF-8, as texts are read, whatever the locale says.
    """
    check_checkpoint(checkpoint)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    import torch

    from hvd_transformer.inference.trained_model import load_trained

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no usable GPU")
    return load_trained(checkpoint, task, device)


def lines_of(file: Path | None) -> Iterator[str]:
    """The lines of the file, or of standard input, without line ends. Raises `UserError`."""
    from hvd_transformer.data.text_files import read_lines

    return read_lines(file)


def place_of(file: Path | None, line: int) -> str:
    """A line of the file, or of standard input, for messages."""
    return f"{file or 'standard input'}, line {line}"


def window(file: Path | None) -> dict[str, Any]:
    """Arguments for `in_batches`: lines typed on a terminal are answered one by one."""
    return {"window": 1} if file is None and sys.stdin is not None and sys.stdin.isatty() else {}

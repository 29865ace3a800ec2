"""`hvd-train`: the process that horovodrun or mpirun starts on every rank; started alone it is a world of one."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from hvd_transformer.cli import options
from hvd_transformer.cli.main import run, version
from hvd_transformer.cli.rank_process import run_ranks, tensor_of
from hvd_transformer.config.load import dump, load, preset_names, preset_summary
from hvd_transformer.config.schema import KEYS, SECTIONS, Config, field, flatten, shown
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.comm.world import World
    from hvd_transformer.monitoring.watchdog import Watchdog
    from hvd_transformer.training.process import StopRequest


def reference() -> str:
    """All keys by section, each with its default, allowed values and description; then the presets."""
    blocks, defaults = [], flatten(Config())
    for section in ("", *SECTIONS):
        model = Config.model_fields[section].annotation if section else None
        lines = [(model.__doc__ or section).rstrip(".") if model else "The job"]
        for key in [key for key in KEYS if key.rpartition(".")[0] == section]:
            found = field(key)
            choices = get_args(found.annotation) if get_origin(found.annotation) is Literal else ()
            lines.append(f"  {key}={shown(defaults[key])}" + (f"  ({' | '.join(choices)})" if choices else ""))
            lines.append(f"      {found.description}")
        blocks.append("\n".join(lines))
    presets = "\n".join(f"  {name:<18} {preset_summary(name)}" for name in preset_names())
    return "\n\n".join([*blocks, f"Presets\n{presets}"])


class _Help(click.Command):
    """Append every configuration key to `--help`, from the schema."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\n" + reference() + "\n")


@click.command(cls=_Help, context_settings={"help_option_names": ["-h", "--help"]})
@options.config_file
@options.preset
@click.option("--print-config", is_flag=True, help="Print the complete configuration as YAML for --config, and exit.")
@version
@options.settings
def command(file: Path | None, preset: str | None, print_config: bool, settings: tuple[str, ...]) -> None:
    """Train a Transformer, on the ranks that horovodrun or mpirun started or in a single process.

    KEY=VALUE settings override --config, which overrides --preset.
    """
    if print_config:
        _print_config(load(preset, file, settings))
        return
    config, mistake = None, None
    try:
        config = load(preset, file, settings)
    except UserError as error:
        mistake = error

    def train(world: "World", stop: "StopRequest", watchdog: "Watchdog") -> int:
        from hvd_transformer.comm.world import agree
        from hvd_transformer.training.job_setup import check_same_configuration
        from hvd_transformer.training.train_job import run

        agreed = agree(world, lambda: _raise_or_return(config, mistake))
        agree(world, lambda: check_same_configuration(agreed, world))
        summary = run(agreed, world, stop, watchdog)
        return 0 if summary["status"] == "finished" else 1

    # The process sets must exist before the ranks can tell each other of an error.
    tensor = config.parallel.tensor if config else tensor_of(settings)
    sys.exit(run_ranks("hvd-train", train, tensor, config.training.stall_seconds if config else None, mistake))


def config_of(words: Sequence[str]) -> Config:
    """The configuration for these arguments of hvd-train. Raises `UserError`."""
    return config_of_job(command.make_context("hvd-train", list(words)).params)


def config_of_job(given: Mapping[str, Any]) -> Config:
    """The configuration for these parameters of hvd-train, which shall train. Raises `UserError`."""
    if given["print_config"]:
        raise UserError("--print-config: not for a job; use hvd-train --print-config")
    return load(given["preset"], given["file"], given["settings"])


def main() -> None:
    """The console script."""
    run(command, "hvd-train")


def _print_config(config: Config) -> None:
    """On several ranks only the first one prints."""
    from hvd_transformer.comm.horovod_env import launched

    if launched().rank == 0:
        click.echo(dump(config), nl=False)


def _raise_or_return(config: Config | None, mistake: UserError | None) -> Config:
    if mistake is not None:
        raise mistake
    assert config is not None
    return config


if __name__ == "__main__":
    main()

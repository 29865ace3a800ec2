"""`hvd-train`: the worker that horovodrun or mpirun starts on every rank; started alone it is a world of one."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_transformer.cli import errors
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.comm.world import World
    from hvd_transformer.config import Config
    from hvd_transformer.training.stop import StopRequest
    from hvd_transformer.training.watchdog import Watchdog


class _Help(click.Command):
    """Adds every key of the configuration to `--help`, from the schema itself."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from hvd_transformer.config.reference import reference

        formatter.write("\n" + reference() + "\n")


@click.command(cls=_Help, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "file", type=click.Path(path_type=Path), help="A YAML file of settings.")
@click.option("--preset", metavar="NAME", help="A set of settings that comes with the package (listed below).")
@click.argument("settings", metavar="[KEY=VALUE ...]", nargs=-1)
def command(file: Path | None, preset: str | None, settings: tuple[str, ...]) -> None:
    """Train a Transformer on the ranks that horovodrun or mpirun started, or alone.

    KEY=VALUE settings override --config, which overrides --preset.
    """
    from hvd_transformer.cli.ranks import run_ranks, tensor_of
    from hvd_transformer.config import load

    config, mistake = None, None
    try:
        config = load(preset, file, settings)
    except UserError as error:
        mistake = error

    def train(world: "World", stop: "StopRequest", watchdog: "Watchdog") -> int:
        from hvd_transformer.comm.world import agree
        from hvd_transformer.training.assembly import check_same_configuration
        from hvd_transformer.training.job import run

        agreed = agree(world, lambda: _raise_or_return(config, mistake))
        agree(world, lambda: check_same_configuration(agreed, world))
        summary = run(agreed, world, stop, watchdog)
        return 0 if summary["status"] == "finished" else 1

    # The ranks must be in groups before they can tell each other of a mistake.
    tensor = config.parallel.tensor if config else tensor_of(settings)
    sys.exit(run_ranks("hvd-train", train, tensor, config.training.stall_seconds if config else None, mistake))


def main() -> None:
    """The console script."""
    errors.run(command, "hvd-train")


def _raise_or_return(config: "Config | None", mistake: UserError | None) -> "Config":
    if mistake is not None:
        raise mistake
    assert config is not None
    return config


if __name__ == "__main__":
    main()

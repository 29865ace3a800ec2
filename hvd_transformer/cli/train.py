"""`hvd-train`: the worker that horovodrun or mpirun starts on every rank; started alone it is a world of one."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_transformer.errors import WRONG_INPUT, UserError

if TYPE_CHECKING:
    from hvd_transformer.comm.world import World
    from hvd_transformer.config import Config
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
    from hvd_transformer.config import load

    config, mistake = None, None
    try:
        config = load(preset, file, settings)
    except UserError as error:
        mistake = error
    # Horovod must know the groups of ranks before these can tell each other of a mistake.
    tensor = config.parallel.tensor if config else _tensor(settings)
    sys.exit(_work(config, mistake, tensor))


def main() -> None:
    """The console script."""
    command()


def _tensor(settings: Sequence[str]) -> int:
    """`parallel.tensor` as the words alone have it, where the configuration is wrong."""
    given = [value for key, _, value in (word.partition("=") for word in settings) if key == "parallel.tensor"]
    return int(given[-1]) if given and given[-1].isdecimal() and int(given[-1]) else 1


def _work(config: "Config | None", mistake: UserError | None, tensor: int) -> int:
    """The exit code. A wrong setting is shown once, by rank 0, also when another rank made it."""
    from hvd_transformer.comm.environment import launched
    from hvd_transformer.parallel.layout import process_groups
    from hvd_transformer.training.watchdog import Watchdog

    place = launched()
    if mistake is not None and place.size == 1:
        return _fail(mistake)
    watchdog = Watchdog(place.rank, place.size, config.training.stall_seconds if config else None)
    watchdog.start()
    try:
        return _train(config, mistake, place.rank, watchdog, process_groups(place.size, tensor))
    finally:
        watchdog.close()


def _train(
    config: "Config | None",
    mistake: UserError | None,
    rank: int,
    watchdog: "Watchdog",
    groups: Sequence[Sequence[int]],
) -> int:
    from hvd_transformer.comm.group import PeerLost
    from hvd_transformer.comm.world import AgreedError, World, agree
    from hvd_transformer.data.once import Stopped
    from hvd_transformer.parallel.replicas import ReplicasDiffer
    from hvd_transformer.training.job import run
    from hvd_transformer.training.loop import Diverged
    from hvd_transformer.training.stop import StopRequest

    stop = StopRequest()
    try:
        world = World.start(watchdog.stall_seconds, groups)
    except UserError as error:
        if rank == 0:
            _fail(error)
        else:
            time.sleep(1)  # a launcher ends all ranks at the first exit
        _leave(WRONG_INPUT)  # an MPI that did not start right would not end either
    watchdog.heartbeat.world = world
    try:
        config = agree(world, lambda: _raise_or_return(config, mistake))
        agree(world, lambda: _same_configuration(config, world))
        summary = run(config, world, stop, watchdog)
        world.close()
        return 0 if summary["status"] == "finished" else 1
    except UserError as error:
        if world.rank == 0 or not isinstance(error, AgreedError):
            _fail(error)
        if isinstance(error, AgreedError):
            world.close()  # waits until the message is out, before a launcher ends the job for the first exit code
        return WRONG_INPUT
    except (Diverged, ReplicasDiffer) as error:
        if world.rank == 0:
            _fail(error)
        return 1
    except Stopped:
        _fail(UserError("stopped while the data was prepared; the same command begins again"))
        _leave(1)
    except PeerLost as error:
        _fail(error)
        _leave(1)
    except BaseException:
        _report_crash(world.rank)
        _leave(1)
    return 1


def _raise_or_return(config: "Config | None", mistake: UserError | None) -> "Config":
    if mistake is not None:
        raise mistake
    assert config is not None
    return config


def _same_configuration(config: "Config", world: "World") -> None:
    """Raises `UserError` naming the first key in which a rank differs from rank 0."""
    from hvd_transformer.config.schema import flatten

    first, *others = world.all_gather_objects(flatten(config))
    for rank, other in enumerate(others, start=1):
        for key, value in first.items():
            if other[key] != value:
                raise UserError(
                    f"{key}: rank {rank} has {other[key]}, rank 0 has {value}; every rank needs the same configuration"
                )


def _fail(error: Exception) -> int:
    print(f"hvd-train: {error}", file=sys.stderr, flush=True)
    return WRONG_INPUT


def _report_crash(rank: int) -> None:
    """A fault of ours: the whole traceback, on the screen and in this rank's log."""
    text = traceback.format_exc()
    logging.getLogger("hvd_transformer").error("%s", text)
    print(f"hvd-train: rank {rank} failed:\n{text}", file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    """Ends this process at once: an orderly shutdown would wait for ranks that may never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)

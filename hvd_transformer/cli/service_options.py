"""What the commands that talk to the service share: options, numbers of jobs, and how they answer."""

import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hvd_transformer.cli.main import show as show_error
from hvd_transformer.errors import WRONG_INPUT, UserError

if TYPE_CHECKING:
    from hvd_transformer.service.remote.client import Client
    from hvd_transformer.service.remote.reading import Reading

_MAX_JOBS = 10_000

# Options of `launch` that a job of the service cannot have: the service chooses the hosts and starts the launcher. The
# rest has options of `submit` itself.
NOT_FOR_JOBS = {
    "num_ranks", "min_ranks", "hostfile", "host_discovery_script", "named", "detach", "dry_run", "scheduler", "output",
}  # fmt: skip
# Options of `launch` that only jobs of these engines can have.
_FOR_ENGINES = {"hosts": ("slurm", "kubernetes"), "image": ("kubernetes",), "memory_gib": ("kubernetes",)}


class Jobs(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """The number of a job, or a range such as 12-40."""

    name = "job"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        found = re.fullmatch(r"([1-9]\d{0,17})(?:-([1-9]\d{0,17}))?", str(value), re.ASCII)
        if found is None:
            self.fail(f"{value!r} is not the number of a job, nor a range such as 12-40.", param, ctx)
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < _MAX_JOBS:
            self.fail(f"{value!r}: must be a range of 1 to {_MAX_JOBS:,} jobs.", param, ctx)
        return tuple(range(first, last + 1))


def _once(ctx: click.Context, param: click.Parameter, value: tuple[tuple[int, ...], ...]) -> list[int]:
    """Each number once, in order."""
    return list(dict.fromkeys(number for numbers in value for number in numbers))


server = click.option(
    "--server",
    metavar="URL",
    help="The service: https://HOST:PORT, or its state folder. Default: $HVD_TRANSFORMER_SERVER, else that of this "
    "user on this host.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
jobs = click.argument("jobs", nargs=-1, required=True, type=Jobs(), metavar="JOB...", callback=_once)
job = click.argument("job", type=click.IntRange(1), metavar="JOB")


def check_engine_options(context: click.Context, engine: str) -> None:
    """Raise `UserError` for an option of `launch` on a command line that a job of this engine cannot have."""
    for parameter in context.command.params:
        engines = _FOR_ENGINES.get(str(parameter.name), (engine,))
        if engine not in engines and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE:
            raise UserError(f"{parameter.opts[0]}: only with --engine {' or '.join(engines)}")


def client_of(given: str | None) -> "Client":
    """The service of --server. Raises `UserError`."""
    from hvd_transformer.service.remote.address import Address
    from hvd_transformer.service.remote.client import Client

    return Client(Address.find(given))


def reading(given: str | None, words: Sequence[str] = ()) -> "Reading":
    """Where a listing comes from: the service or, if it is down, its database, which is said on stderr.

    Run directories alone, the `words`, need neither, nor must the service of this user know them.
    """
    from hvd_transformer.service.remote.address import DATABASE, expanded
    from hvd_transformer.service.remote.client import NoService
    from hvd_transformer.service.remote.reading import Online

    client = client_of(given)
    try:
        client.get("me")
    except NoService as error:
        from hvd_transformer.service.remote.offline import Offline

        state = client.address.state
        if state is None or not (state / DATABASE).exists():
            if given is not None or not words or not all(expanded(word).is_dir() for word in words):
                raise
            return Offline.of_directories()
        show_error("hvd-transformer", f"{error}; this is what its database has")
        return Offline(state)
    return Online(client, directories=given is None)


def print_json(document: Any) -> None:
    """A document for programs."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def change(given: str | None, numbers: Sequence[int], action: str, done: str, as_json: bool, **more: Any) -> None:
    """Ask for the same change of several jobs. Exits with code 2 if some of them could not be changed."""
    answer = client_of(given).post("jobs/bulk", {"ids": list(numbers), "action": action, **more})
    if as_json:
        print_json(answer)
    else:
        for number in answer["done"]:
            click.echo(f"job {number}: {done}")
    for number, line in answer["errors"].items():
        show_error("hvd-transformer", line if line.startswith(f"job {number}") else f"job {number}: {line}")
    if answer["errors"]:
        sys.exit(WRONG_INPUT)

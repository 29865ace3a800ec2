"""`hvd-transformer hosts`: the hosts of the service."""

from pathlib import Path
from typing import Any

import click

from hvd_transformer.cli import options, service_options
from hvd_transformer.errors import UserError


@click.group(invoke_without_command=True)
@service_options.server
@service_options.as_json
@click.pass_context
def hosts(context: click.Context, server: str | None, as_json: bool) -> None:
    """Show the hosts of the service and who uses them, or change them."""
    if context.invoked_subcommand is not None:
        if server is not None or as_json:
            raise UserError(f"--server and --json: put them behind hosts {context.invoked_subcommand}")
        return
    answer = service_options.client_of(server).get("hosts")
    if as_json:
        service_options.print_json(answer)
        return
    from hvd_transformer.cli.service_tables import print_table

    print_table(
        ["host", "slots", "in use", "gpus", "state", "load", "jobs", "findings"],
        [
            [
                host["name"],
                host["slots"],
                sum(use["ranks"] for use in host["used"]),
                ",".join(map(str, host["gpus"])),
                f"down: {host['down']}" if host["down"] else "drained" if host["drained"] else "up",
                "" if host["load"] is None else f"{host['load']:.2f}",
                ", ".join(_use(use) for use in host["used"]),
                "; ".join(finding for finding in host["findings"] if finding != host["down"]),
            ]
            for host in answer["items"]
        ],
    )


def _use(use: dict[str, Any]) -> str:
    who = use["name"] if use["job"] is None else f"{use['job']} ({use['owner']})"
    gpus = f" on gpus {','.join(map(str, use['gpus']))}" if use["gpus"] else ""
    return f"{who}: {use['ranks']}{gpus}"


def _gpus(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for word in value:
        host, equals, numbers = word.partition("=")
        given = numbers.split(",") if numbers else []
        if not equals or not host or not all(number.isdecimal() for number in given):
            raise click.BadParameter(f"{word!r} is not of the form HOST=0,1.", ctx, param)
        found[host] = [int(number) for number in given]
    return found


@hosts.command()
@click.argument("names", required=False, metavar="HOST:SLOTS,…")
@options.hostfile
@click.option(
    "--gpus",
    multiple=True,
    callback=_gpus,
    metavar="HOST=0,1",
    help="GPU numbers of a host; HOST= removes them. Repeatable.",
)
@service_options.server
@service_options.as_json
def add(
    names: str | None, hostfile: Path | None, gpus: dict[str, list[int]], server: str | None, as_json: bool
) -> None:
    """Add hosts, or change their slots, such as h1:4,h2:4 or node[01-08]:2; the service must reach them with ssh.

    `hvd-transformer hosts add h1:4,h2:4 --gpus h1=0,1,2,3`
    """
    if (names is None) == (hostfile is None):
        raise UserError("give either HOST:SLOTS,… or --hostfile")
    if hostfile is not None:
        from hvd_transformer.launch.hostfile import read_hostfile

        read = read_hostfile(hostfile)
        names = ",".join(f"{host.name}:{host.slots}" for host in read)
        gpus = {**{host.name: list(host.gpus) for host in read if host.gpus}, **gpus}
    answer = service_options.client_of(server).post("hosts", {"hosts": names, "gpus": gpus})
    if as_json:
        service_options.print_json(answer)
    else:
        click.echo(f"{names}: added")


def _change(names: tuple[str, ...], action: str, done: str, server: str | None, as_json: bool) -> None:
    client = service_options.client_of(server)
    answer = None
    for name in names:
        answer = client.post(f"hosts/{name}/{action}", {})
        if not as_json:
            click.echo(f"{name}: {done}")
    if as_json:
        service_options.print_json(answer)


_names = click.argument("names", nargs=-1, required=True, metavar="HOST...")


@hosts.command()
@_names
@service_options.server
@service_options.as_json
def drain(names: tuple[str, ...], server: str | None, as_json: bool) -> None:
    """Start no new jobs on these hosts; running jobs continue."""
    _change(names, "drain", "takes no new jobs", server, as_json)


@hosts.command()
@_names
@service_options.server
@service_options.as_json
def resume(names: tuple[str, ...], server: str | None, as_json: bool) -> None:
    """Let hosts that were drained take jobs again."""
    _change(names, "resume", "takes jobs", server, as_json)


@hosts.command()
@_names
@service_options.server
@service_options.as_json
def remove(names: tuple[str, ...], server: str | None, as_json: bool) -> None:
    """Forget hosts that no job uses."""
    _change(names, "remove", "removed", server, as_json)

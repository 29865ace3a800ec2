"""`hvd-transformer token`: the tokens that let users reach the service over the network."""

import time

import click

from hvd_transformer.cli import options, service_options


@click.group()
def token() -> None:
    """Make, list and revoke tokens, with which users reach the service over the network. For its admins."""


@token.command()
@click.argument("name")
@click.option("--owner", required=True, metavar="USER", help="User whose jobs are submitted with the token.")
@click.option(
    "--role",
    type=click.Choice(["view", "submit", "admin"]),
    default="submit",
    show_default=True,
    help="view: look; submit: also submit jobs and change one's own; admin: also change all jobs, hosts and tokens.",
)
@click.option(
    "--expires", type=options.Seconds(), metavar="TIME", help="Valid for so long. Default: until it is revoked."
)
@service_options.server
@service_options.as_json
def add(name: str, owner: str, role: str, expires: float | None, server: str | None, as_json: bool) -> None:
    """Make a token called NAME and print it; it is never shown again.

    Its user puts it into $HVD_TRANSFORMER_TOKEN or a private file, ~/.config/hvd-transformer/token.
    """
    until = None if expires is None else time.time() + expires
    body = {"name": name, "owner": owner, "role": role, "expires": until}
    answer = service_options.client_of(server).post("tokens", body)
    if as_json:
        service_options.print_json(answer)
    else:
        click.echo(answer["token"])


@token.command("list")
@service_options.server
@service_options.as_json
def list_tokens(server: str | None, as_json: bool) -> None:
    """List the tokens, without their secrets."""
    answer = service_options.client_of(server).get("tokens")
    if as_json:
        service_options.print_json(answer)
        return
    from hvd_transformer.cli.service_tables import ago, print_table, until

    print_table(
        ["id", "name", "user", "role", "made", "expires"],
        [
            [item["id"], item["name"], item["owner"], item["role"], ago(item["created"]), until(item["expires"])]
            for item in answer["items"]
        ],
    )


@token.command()
@click.argument("number", type=click.IntRange(1), metavar="ID")
@service_options.server
@service_options.as_json
def revoke(number: int, server: str | None, as_json: bool) -> None:
    """Revoke the token ID (see `token list`); it is refused from now on."""
    service_options.client_of(server).delete(f"tokens/{number}")
    if as_json:
        service_options.print_json({"revoked": number})
    else:
        click.echo(f"token {number}: revoked")

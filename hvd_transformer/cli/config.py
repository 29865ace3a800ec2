"""`hvd-transformer config`: a JSON schema for editors, and what differs between two configurations."""

import json
from pathlib import Path
from typing import Any

import click

from hvd_transformer.cli import options, service_options
from hvd_transformer.errors import UserError


@click.group()
def config() -> None:
    """Work with configurations: the JSON schema of their files, and the differences between two of them."""


@config.command()
def schema() -> None:
    """Print the JSON schema of a --config FILE, with which editors complete, explain and check its keys.

    `hvd-transformer config schema > hvd-train.schema.json`

    Editors with a YAML language server use it for files that begin with
    `# yaml-language-server: $schema=hvd-train.schema.json`
    """
    from hvd_transformer.config.json_schema import json_schema

    service_options.print_json(json_schema())


@config.command()
@click.argument("first", type=options.PATH, metavar="RUN")
@click.argument("second", type=options.PATH, metavar="RUN")
@service_options.as_json
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Show the configuration keys in which two runs differ.

    Each RUN is a run directory, a checkpoint, or a YAML file such as its config.yaml.

    `hvd-transformer config diff runs/last-week runs/today`

    Complete configurations are compared: a key that a file leaves out has its default. `hvd-transformer compare` also
    knows the jobs of a service, and shows how runs ended.
    """
    from hvd_transformer.config.schema import KEYS, shown

    values = [_configuration(path) for path in (first, second)]
    differs = {key: [value[key] for value in values] for key in KEYS if values[0][key] != values[1][key]}
    if as_json:
        service_options.print_json({"differs": differs})
    elif differs:
        from hvd_transformer.cli.service_tables import print_table

        print_table(["key", "first", "second"], [[key, *map(shown, pair)] for key, pair in differs.items()])
    else:
        click.echo("no key differs")


def _configuration(path: Path) -> dict[str, Any]:
    """The complete configuration of a run, a checkpoint or a file, by dotted key. Raises `UserError`."""
    from hvd_transformer.config.load import load, load_again
    from hvd_transformer.config.schema import flatten

    file, state = path / "config.yaml", path / "state.json"
    if not path.is_dir() or file.exists():
        return flatten(load(file=file if path.is_dir() else path))
    try:
        saved = json.loads(state.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{path}: neither a run directory nor a checkpoint: it has no config.yaml or state.json"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{state}: cannot be read: {error}") from None
    values = saved.get("config") if isinstance(saved, dict) else None
    if not isinstance(values, dict):
        raise UserError(f"{state}: not the state of a checkpoint: it has no configuration")
    return flatten(load_again(values, str(state)))

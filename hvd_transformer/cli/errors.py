"""What every command does with an error: a user's mistake is one line on stderr and exit code 2."""

import sys

import click

from hvd_transformer.errors import WRONG_INPUT, UserError


def run(command: click.Command, name: str) -> None:
    """Runs it with this process's words, and exits: with 2 where these are wrong, which one line says."""
    try:
        sys.exit(command.main(prog_name=name, standalone_mode=False))
    except UserError as error:
        show(name, error)
        sys.exit(WRONG_INPUT)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        show(context.command_path if context else name, error.format_message())
        sys.exit(error.exit_code)
    except click.Abort:
        show(name, "interrupted")
        sys.exit(1)


def show(name: str, error: Exception | str) -> None:
    """On stderr, as one line: what a user wrote may hold line breaks."""
    print(f"{name}: {' '.join(str(error).splitlines())}", file=sys.stderr, flush=True)

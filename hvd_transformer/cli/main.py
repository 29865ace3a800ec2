"""`hvd-transformer COMMAND`: the group of commands, each imported only when it is called."""

import sys
from importlib import import_module

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


# Name → one line of help. The command is the function of that name in cli/<name>.py.
COMMANDS = {
    "classify": "Label lines of text with a trained classifier.",
    "doctor": "Say what is wrong with which host, and what to do.",
    "evaluate": "Give a trained model's metrics on a split or a file, on any number of ranks.",
    "export": "Write a trained model's folder: weights, tokenizers, configuration.",
    "generate": "Continue texts with a trained language model.",
    "launch": "Train on the ranks of many hosts: hvd-train under horovodrun.",
    "plan": "Show what a job needs, before it is started: memory of each stage, bubbles.",
    "prepare": "Write a data source's token files, before a job needs them.",
    "report": "Draw a run directory's curves again: report.html and PNG files.",
    "translate": "Translate lines of text with a trained encoder-decoder.",
}


class LazyGroup(click.Group):
    """Knows its commands by name; imports one when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"hvd_transformer.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hvd-transformer")
def group() -> None:
    """Train Transformers on many hosts with Horovod. Training itself is `hvd-train`, under horovodrun or alone."""


def main() -> None:
    """The console script."""
    run(group, "hvd-transformer")


if __name__ == "__main__":
    main()

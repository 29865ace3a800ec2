"""`hvd-transformer COMMAND`: the command group; a command is imported only when it is called."""

import difflib
import errno
import io
import os
import sys
from importlib import import_module

import click

from hvd_transformer.errors import WRONG_INPUT, UserError


def run(command: click.Command, name: str) -> None:
    """Run `command` on this process's arguments and exit; invalid input gives one line on stderr and exit code 2.

    So does a path that cannot be, or another user's file, that a command does not expect. Output to a full disk gives
    exit code 1.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # help has more than Latin-1
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
    except OSError as error:
        if error.errno == errno.ENOSPC:
            show(name, "the output cannot be written: " + _described(error))
            sys.exit(1)
        is_path = isinstance(error, (PermissionError, NotADirectoryError)) or error.errno == errno.ENAMETOOLONG
        if not is_path or error.filename is None:
            raise
        show(name, _described(error))
        sys.exit(WRONG_INPUT)


def _described(error: OSError) -> str:
    file = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{file}{error.strerror}"


def show(name: str, error: Exception | str) -> None:
    """Print an error to stderr as one line, even if the user's words contain line breaks."""
    print(f"{name}: {' '.join(str(error).splitlines())}", file=sys.stderr, flush=True)


# Name → one line of help. Each command is the function of that name in cli/<name>.py.
COMMANDS = {
    "attach": "Show a job that runs under a launcher.",
    "bench": "Measure this machine: allreduce, training, checkpoints, data.",
    "cancel": "End jobs of the service.",
    "classify": "Classify lines of text with a trained model.",
    "compare": "Show what differs between jobs or runs, and how they ended.",
    "config": "Print the JSON schema of configuration files, or what differs between two runs.",
    "doctor": "Check the hosts of a job and say how to fix their problems.",
    "evaluate": "Compute a trained model's metrics on a split or a file, on any number of ranks.",
    "export": "Export a trained model: weights, tokenizers, configuration.",
    "generate": "Continue texts with a trained language model.",
    "hold": "Keep jobs of the service from starting.",
    "hosts": "Show, add, drain and resume the hosts of the service.",
    "launch": "Train on many hosts: hvd-train under horovodrun, with restarts.",
    "logs": "Print the log of a job, and follow it.",
    "plan": "Estimate a job's memory per pipeline stage and its bubbles, before it is started.",
    "prepare": "Tokenize a data source ahead of training.",
    "priority": "Change the priority of a job.",
    "queue": "List the jobs of the service.",
    "release": "Let jobs start that were on hold.",
    "report": "Redraw the charts of a run: report.html and PNG files.",
    "retry": "Queue jobs again that have failed or were cancelled.",
    "serve": "Run a queue of jobs over hosts, and show their runs in a browser.",
    "show": "Show everything about a job or run.",
    "stop": "End a job that runs under a launcher, after it has saved.",
    "submit": "Queue a job, to start when hosts are free.",
    "sweep": "Train with many settings and show which are best: grid, random, Optuna, successive halving.",
    "token": "Make, list and revoke tokens for the service.",
    "translate": "Translate lines of text with a trained encoder-decoder.",
    "wait": "Wait for jobs to end; the exit code is the job's.",
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"hvd_transformer.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}, did you mean {near[0]}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


# Of both programs, which come with one package.
version = click.version_option(package_name="hvd-transformer", prog_name="hvd-transformer")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@version
def group() -> None:
    """Train Transformers on many hosts with Horovod. The training process itself is `hvd-train`."""


def main() -> None:
    """The console script."""
    run(group, "hvd-transformer")


if __name__ == "__main__":
    main()

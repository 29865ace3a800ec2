"""`hvd-transformer submit`: gives a job to the service, which starts it when its hosts are free."""

from copy import copy
from pathlib import Path
from typing import Any

import click

from hvd_transformer.cli import options, service_options
from hvd_transformer.cli.launch import launch

# The options of this command that are fields of the request; those of `launch` go with the job as they are.
_OWN = (
    "num_ranks", "min_ranks", "name", "priority", "tags", "after", "array", "time_limit", "hold", "max_retries",
    "env_names", "env_file", "folder", "words", "engine", "sbatch", "server", "as_json",
)  # fmt: skip


def _numbers(ctx: click.Context, param: click.Parameter, value: tuple[tuple[int, ...], ...]) -> list[int]:
    return [number for numbers in value for number in numbers]


@click.command(cls=options.WithJobArguments)
@click.option(
    "-np",
    "--np",
    "num_ranks",
    type=int,
    metavar="N",
    help="Number of ranks. Default: those of one replica of the model.",
)
@click.option(
    "--min-np",
    "min_ranks",
    type=int,
    metavar="N",
    help="Elastic job: start with as few ranks, and grow up to -np. Needs training.global_batch_size.",
)
@click.option("--name", metavar="NAME", help="Default: the preset, configuration file or task.")
@click.option(
    "--priority",
    type=int,
    default=0,
    metavar="N",
    help="From -1000 to 1000. Jobs of a higher priority start first and stop those of a lower one to make room.",
)
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Word to find the job by; repeatable.")
@click.option(
    "--after",
    multiple=True,
    type=service_options.Jobs(),
    callback=_numbers,
    metavar="JOB",
    help="Start only when this job has succeeded; repeatable.",
)
@click.option(
    "--array",
    multiple=True,
    metavar="KEY=V1,V2,…",
    help="One job per value; repeatable: one job per combination.",
)
@click.option("--time-limit", type=options.Seconds(), metavar="TIME", help="Stop the job when it has run for so long.")
@click.option("--hold", is_flag=True, help="Do not start the job before `release`.")
@click.option(
    "--max-retries",
    type=int,
    default=3,
    show_default=True,
    metavar="N",
    help="Start the job again up to N times after a stall or the loss of a host.",
)
@click.option("--env", "env_names", multiple=True, metavar="NAME", help="Variable to pass to the ranks; repeatable.")
@click.option(
    "--env-file",
    metavar="FILE",
    help="Private file with the values of --env, NAME=VALUE lines. It is read when the job starts.",
)
@click.option(
    "--folder", type=options.PATH, metavar="DIR", help="Folder to run in, on the hosts. Default: the current one."
)
@click.option(
    "--engine",
    type=click.Choice(["hosts", "slurm", "kubernetes"]),
    default="hosts",
    show_default=True,
    help="What runs the job: the hosts of the service, or another scheduler to which the service sends it.",
)
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="With --engine slurm, an option of sbatch, such as --sbatch=--partition=gpu; repeatable.",
)
@service_options.server
@service_options.as_json
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS...]")
@click.pass_context
def submit(context: click.Context, /, **given: Any) -> None:
    """Queue a training job. The arguments of hvd-train follow `--` and are checked at once.

    `hvd-transformer submit -np 8 --time-limit 12h -- --preset python-docs optimizer.lr=1e-3`

    `hvd-transformer submit -np 4 --array optimizer.lr=1e-3,3e-4 --array seed=1,2,3 -- --preset tiny`

    What is submitted is kept: the configuration as it is now and, with a task of your own, the Python modules of it
    that are in the current folder. Relative paths of data are relative to that folder. Without output_dir the job
    gets a run directory of its own, NAME-ID, in the runs folder of the service.

    The options of `launch` below go to the job's launcher; hosts are chosen by the service. With --engine slurm or
    kubernetes the service sends the job there and follows it: -H a:4,b:4 then stands for two nodes with four slots
    each, whatever they are called.
    """
    service_options.check_engine_options(context, given["engine"])
    folder = given["folder"] or Path.cwd()
    request = {
        "words": list(given["words"]),
        "launch": options.passed_on(context, without=_OWN),
        "folder": str(folder.absolute()),
        **{name: given[name] for name in ("num_ranks", "min_ranks", "name", "priority", "time_limit", "hold")},
        **{name: given[name] for name in ("max_retries", "env_file", "engine")},
        **{name: list(given[name]) for name in ("tags", "after", "array", "env_names", "sbatch")},
    }
    answer = service_options.client_of(given["server"]).submit(request)
    if given["as_json"]:
        service_options.print_json(answer)
        return
    for job in answer["jobs"]:
        why = f": {job['reason']}" if job["reason"] else ""
        click.echo(f"job {job['id']} ({job['name']}): {job['state']}{why}")


_HELP = {
    "hosts": "With --engine slurm or kubernetes: nodes and their slots, such as a:4,b:4.",
    "image": "With --engine kubernetes, which needs it: a container image that the cluster can pull.",
    "memory_gib": "With --engine kubernetes: memory per worker to request. Default: what `plan` estimates.",
}


def _of_launch(option: click.Parameter) -> click.Parameter:
    """An option of `launch`, with what it means for a job of the service."""
    option = copy(option)
    if isinstance(option, click.Option) and option.name in _HELP:
        option.help = _HELP[option.name]
    return option


_LEFT_OUT = (*service_options.NOT_FOR_JOBS, "settings")
submit.params += [_of_launch(option) for option in launch.params if option.name not in _LEFT_OUT]

"""Jobs of the service for another scheduler: what `submit` leaves open, and their job files.

Part of the checking process (`job_checker.py`): the service itself imports neither the command line nor torch.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hvd_transformer.cli.job_file import job_file as text_of
from hvd_transformer.cli.job_file import planned_bytes
from hvd_transformer.cli.launch import launch
from hvd_transformer.cli.launch_options import LaunchOptions
from hvd_transformer.config import Config
from hvd_transformer.config.load import load
from hvd_transformer.config.schema import flatten
from hvd_transformer.errors import UserError
from hvd_transformer.launch.host_pool import HostPool, find_hosts, resolve_min_ranks
from hvd_transformer.launch.hostfile import Host

# Settings that arrays often vary, and that change no memory.
_WITHOUT_MEMORY = {
    "seed", "output_dir", "optimizer.lr", "optimizer.lr_scaling", "optimizer.weight_decay", "optimizer.schedule",
    "optimizer.warmup_steps", "optimizer.gamma", "training.label_smoothing",
}  # fmt: skip
_PLANNED: dict[tuple[str, tuple[Host, ...]], int] = {}  # in the process of one request


def complete(config: Config, request: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The number of ranks of a new job, and the options of `launch` that its job file needs besides the given ones.

    Raises `UserError` if the job file cannot express the job.
    """
    if request["engine"] == "kubernetes" and context_of(launch, request["launch"]).params["image"] is None:
        raise UserError("--engine kubernetes: needs --image, a container image that the cluster can pull")
    # The run directory has its name once the job has its number; other names are as good for a check.
    config = config.model_copy(update={"output_dir": f"{request['runs']}/job"})
    context = _context(request, ())
    hosts, chosen = _hosts(context, config), LaunchOptions(**context.params)
    extra = []
    if request["engine"] == "kubernetes" and chosen.memory_gib is None:
        extra = ["--memory-gib", f"{_worker_bytes(config, hosts) / 2**30:.2f}"]
        context = _context({**request, "launch": [*request["launch"], *extra]}, ())
        chosen = LaunchOptions(**context.params)
    text_of(context, chosen, hosts, config)
    return sum(host.slots for host in hosts), extra


def _worker_bytes(config: Config, hosts: Sequence[Host]) -> int:
    """Cached `planned_bytes`, which takes seconds: computed once for all jobs of an array that need the same."""
    settings = {key: value for key, value in flatten(config).items() if key not in _WITHOUT_MEMORY}
    known = json.dumps(settings), tuple(hosts)
    if known not in _PLANNED:
        _PLANNED[known] = planned_bytes(config, hosts)
    return _PLANNED[known]


def job_file(request: Mapping[str, Any]) -> str:
    """The job file of a job that was checked before. Raises `UserError`."""
    context = _context(request, request["words"])
    config = load(overrides=request["words"])
    return text_of(context, LaunchOptions(**context.params), _hosts(context, config), config, request["name"])


def context_of(command: click.Command, words: Sequence[str]) -> click.Context:
    """A command line, parsed. Raises `UserError`."""
    try:
        return command.make_context(str(command.name), list(words))
    except click.exceptions.Exit:  # --help
        raise UserError(f"{words[0]}: not for a job") from None
    except click.ClickException as error:
        raise UserError(error.format_message()) from None


def _context(request: Mapping[str, Any], settings: Sequence[str]) -> click.Context:
    """The command line of `launch` that writes the job file of a job."""
    words = [word for name in request["env_names"] for word in ("--env", name)]
    for option, number in (("-np", request["num_ranks"]), ("--min-np", request["min_ranks"])):
        words += [] if number is None else [option, str(number)]
    return context_of(launch, [*words, *request["launch"], "--scheduler", request["engine"], "--", *settings])


def _hosts(context: click.Context, config: Config) -> list[Host]:
    """So many hosts with so many slots; their names do not matter. Raises `UserError`."""
    given, tensor = context.params, config.parallel.tensor
    find = find_hosts(given["num_ranks"], given["hosts"], None, None, {}, tensor)
    hosts = HostPool(find, given["num_ranks"], tensor).hosts()
    resolve_min_ranks(given["min_ranks"], given["num_ranks"], sum(host.slots for host in hosts), tensor)
    return hosts

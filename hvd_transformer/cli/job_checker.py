"""The process that checks what is submitted to the service, which itself imports neither torch nor the command line.

    python -m hvd_transformer.cli.job_checker IDLE_SECONDS LIMIT_SECONDS

`service/checker.py` starts it and sends requests to its standard input, one JSON object per line; each gets an answer
on standard output. A child process with a limit of time and memory does the work, in the folder of the submitter. The
process ends if there is nothing to do for a while, and with the service.
"""

import gc
import json
import math
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from click.core import ParameterSource

from hvd_transformer.cli import engine_job
from hvd_transformer.cli.engine_job import context_of
from hvd_transformer.cli.launch import launch
from hvd_transformer.cli.launch_options import LaunchOptions
from hvd_transformer.cli.service_options import NOT_FOR_JOBS, check_engine_options
from hvd_transformer.cli.train import command, config_of_job
from hvd_transformer.config.batch_size import check_step_size
from hvd_transformer.config.load import load
from hvd_transformer.config.schema import Config, flatten, may_be_none
from hvd_transformer.config.strict_yaml import NONE_WORDS
from hvd_transformer.errors import UserError
from hvd_transformer.service.submitting import code_snapshot

_MEMORY_BYTES = 1 << 30
_PLANNING_BYTES = 16 << 30  # of addresses, where torch is imported to estimate the memory of workers


def check(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request: what is submitted, complete; {"error": line} for wrong input."""
    try:
        folder = request["folder"]
        try:
            os.chdir(folder)
        except OSError as error:
            raise UserError(f"folder {folder}: cannot be used on the service's host: {error.strerror}") from None
        if "name" in request:
            return {"job_file": engine_job.job_file(request)}
        _check_launch_options(request["launch"], request["engine"])
        jobs = [_resolve(words, request) for words in request["jobs"]]
        return {"jobs": jobs, "code": _snapshot(Path(folder), jobs, Path(request["code"]))}
    except UserError as error:
        return {"error": " ".join(str(error).splitlines())}


def _resolve(words: Sequence[str], request: Mapping[str, Any]) -> dict[str, Any]:
    """One job: its configuration, by dotted key and as words, and what the scheduler must know of it."""
    given = context_of(command, words).params
    config = config_of_job(given)
    num_ranks, extra = request["num_ranks"] or config.parallel.tensor, list[str]()
    if request["engine"] != "hosts":
        num_ranks, extra = engine_job.complete(config, request)
    _check_sizes(config, num_ranks, request["min_ranks"])
    file = given["file"]
    names_output = any(word.partition("=")[0].strip() == "output_dir" for word in given["settings"])
    if file is not None and not names_output:
        with suppress(OSError):
            names_output = "output_dir" in (yaml.safe_load(file.read_bytes()) or ())
    flat = flatten(config)
    del flat["output_dir"]
    return {
        "config": flat,
        "words": as_words(config),
        "tensor": config.parallel.tensor,
        "pipeline": config.parallel.pipeline,
        "device": config.training.device,
        # Not a preset's: its name is no choice of the user.
        "output_dir": str(Path(config.output_dir).expanduser().absolute()) if names_output else None,
        "num_ranks": num_ranks,
        "launch": [*request["launch"], *extra],
        "name": given["preset"] or (file.stem if file is not None else config.task.rpartition(":")[2]),
    }


def as_words(config: Config) -> list[str]:
    """The KEY=VALUE words that make this configuration, but for `output_dir`, of the defaults alone.

    Raises `UserError` for a value from a file that no word can express.
    """
    defaults, flat = flatten(Config()), flatten(config)
    differs = {key: value for key, value in flat.items() if value != defaults[key] and key != "output_dir"}
    words = [f"{key}={_word(key, value)}" for key, value in differs.items()]
    again = flatten(load(overrides=words))
    assert {**again, "output_dir": ""} == {**flat, "output_dir": ""}, words
    return words


def _word(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):  # not as JSON, whose 1e-05 is a text to YAML
        return yaml.safe_dump(
            value, default_flow_style=True, allow_unicode=True, width=math.inf, sort_keys=False
        ).strip()
    if not isinstance(value, str):
        return json.dumps(value)
    if value.startswith(("[", "{")):
        raise UserError(f"{key}={value}: a text that begins like a list or a table cannot be submitted")
    if value.lower() in NONE_WORDS and may_be_none(key):
        raise UserError(f"{key}={value}: a name that means no value on a command line cannot be submitted")
    return value


def _check_sizes(config: Config, num_ranks: int, min_ranks: int | None) -> None:
    """Raise `UserError` for numbers of ranks that this configuration cannot be trained with."""
    tensor = config.parallel.tensor
    for option, ranks in (("-np", num_ranks), ("--min-np", min_ranks)):
        if ranks is not None and ranks % tensor:
            raise UserError(f"{option} {ranks}: must be a multiple of parallel.tensor={tensor}")
    if min_ranks is not None and not 1 <= min_ranks <= num_ranks:
        raise UserError(f"--min-np {min_ranks}: must be from 1 to the number of ranks, {num_ranks}")
    if min_ranks not in (None, num_ranks) and config.training.global_batch_size is None:
        raise UserError(
            f"--min-np {min_ranks}: needs training.global_batch_size, so that a step has as many samples on any number "
            "of ranks"
        )
    check_step_size(config, num_ranks // tensor)


def _check_launch_options(words: Sequence[str], engine: str) -> None:
    """Raise `UserError` for anything that is not an option of `launch` which a job of this engine may have."""
    context = context_of(launch, words)
    if extra := context.params["settings"]:
        raise UserError(f"{extra[0]}: not an option of launch")
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in NOT_FOR_JOBS and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UserError(f"{parameter.opts[0]}: not for a job of the service, which chooses the hosts and starts it")
    check_engine_options(context, engine)
    LaunchOptions(**{**context.params, "scheduler": None if engine == "hosts" else engine})


def _snapshot(folder: Path, jobs: Sequence[dict[str, Any]], store: Path) -> str:
    """Keep the user's own code; the members of an array may name different classes."""
    named = dict.fromkeys(reference for job in jobs for reference in code_snapshot.references(job["config"]))
    try:
        return code_snapshot.save(code_snapshot.collect(folder, list(named)), store)
    except OSError as error:
        raise UserError(f"{store}: the job's code cannot be kept: {error.strerror}") from None


def _child(request: bytes, answers: int, seconds: float) -> NoReturn:
    """Answer one request, within limits."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends this process, whatever it waits for
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    asked = json.loads(request)
    most = _PLANNING_BYTES if asked.get("engine") == "kubernetes" else _MEMORY_BYTES
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        answer = check(asked)
    except MemoryError:
        answer = {"error": f"the configuration needs more than {most >> 20} MiB to be read"}
    with os.fdopen(answers, "wb") as stream:
        stream.write(json.dumps(answer).encode())
    os._exit(0)


def answer_to(request: bytes, seconds: float) -> bytes:
    """The answer of a child process, or what became of the child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            _child(request, writing, seconds)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return answer
    if code == -signal.SIGALRM:
        return _error(f"the check of the configuration took longer than {seconds:g} seconds")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return _error(f"the check of the configuration failed with {how}; see the service's output")


def _error(line: str) -> bytes:
    return json.dumps({"error": line}).encode()


def main() -> None:
    """Answer requests until there is nothing to do."""
    idle, limit = map(float, sys.argv[1:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service's terminal
    gc.collect()
    gc.freeze()  # a child shares this memory
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while select.select([requests], [], [], idle)[0] and (request := requests.readline()).endswith(b"\n"):
        answers.write(answer_to(request, limit) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()

"""What `submit` sends, and what is wrong in it whatever the configuration is."""

import os
import pwd
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from hvd_transformer.errors import UserError
from hvd_transformer.launch.horovodrun_command import check_names
from hvd_transformer.service.jobs import Engine
from hvd_transformer.service.submitting.engine_options import check_engine
from hvd_transformer.service.submitting.env_file import read_values

MAX_PRIORITY = 1000
MAX_RETRIES = 100
_MAX_RANKS = 1_000_000
_MAX_SECONDS = 10 * 365 * 86400.0
_MAX_ID = 10**18 - 1  # of a job: SQLite's numbers have 63 bits
MAX_TAGS, MAX_TAG = 20, 100  # a tag is so many characters
_MAX_WORD, _MAX_WORDS = 100_000, 1_000_000  # bytes: the kernel takes 128 KiB per word of a command line
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

Words = Annotated[list[str], Field(max_length=10_000)]


class Request(BaseModel):
    """What `submit` sends. Names of options in messages are those of `submit`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    words: Words = Field([], description="arguments of hvd-train")
    launch: Words = Field(
        [], description="options of launch; hosts, image and memory_gib only for another engine than hosts"
    )
    engine: Engine = Field(Engine.HOSTS, description="what runs the job: the service's hosts, or another scheduler")
    sbatch: Annotated[list[str], Field(max_length=100)] = Field(
        [], description="more options of sbatch, such as --partition=gpu"
    )
    folder: str = Field(description="absolute path of the folder that the job runs in, on the service's host")
    num_ranks: int | None = Field(None, description="number of ranks; null: those of one replica, parallel.tensor")
    min_ranks: int | None = Field(None, description="fewest ranks to run with, for an elastic job; null: num_ranks")
    name: str | None = Field(None, description="null: the preset, configuration file or task")
    priority: int = Field(0, description="jobs of a higher priority start first and preempt those of a lower one")
    tags: list[str] = Field([], description="words to find the job by")
    after: Annotated[list[int], Field(max_length=1000)] = Field([], description="jobs that must have succeeded")
    hold: bool = Field(False, description="do not start the job before it is released")
    time_limit: float | None = Field(None, description="seconds of running after which the job is stopped")
    array: Annotated[list[str], Field(max_length=100)] = Field(
        [], description="KEY=VALUE,VALUE,… each: one job for every combination"
    )
    env_names: list[str] = Field([], description="variables to pass to the ranks")
    env_file: str | None = Field(None, description="private file with their values, read when the job starts")
    max_retries: int = Field(3, description="how often to start the job again after a stall or a lost host")


def check_request(request: Request, owner: str) -> None:
    """Raise `UserError` for what is wrong whatever the configuration is."""
    texts = {
        "--folder": [request.folder],
        "--tag": request.tags,
        "--array": request.array,
        "--env-file": [request.env_file or ""],
        "--sbatch": request.sbatch,
        "launch options": request.launch,
        "arguments": request.words,
    }
    for option, words in texts.items():
        for word in words:
            _check_text(option, word)
        check_length(option, words)
    if not Path(request.folder).is_absolute():
        raise UserError(f"--folder {request.folder}: must be an absolute path")
    if request.name is not None and not _NAME.fullmatch(request.name):
        raise UserError(
            f"--name {request.name!a}: must be 1 to 80 letters, digits, dots, dashes and underscores, and begin with a "
            "letter or digit"
        )
    for option, number, least, most in (
        *(("--after", job, 1, _MAX_ID) for job in request.after),
        ("-np", request.num_ranks, 1, _MAX_RANKS),
        ("--min-np", request.min_ranks, 1, _MAX_RANKS),
        ("--priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY),
        ("--max-retries", request.max_retries, 0, MAX_RETRIES),
    ):
        if number is not None and not least <= number <= most:
            raise UserError(f"{option} {number}: must be from {least:,} to {most:,}")
    if request.time_limit is not None and not 0 < request.time_limit <= _MAX_SECONDS:
        raise UserError(f"--time-limit {request.time_limit:g}: must be above 0 seconds, and at most ten years")
    check_tags(request.tags)
    check_engine(request.engine, request.sbatch)
    _check_env(request, owner)


def check_tags(tags: Sequence[str]) -> None:
    """Raise `UserError` for a tag that is empty or too long, and for too many."""
    if len(tags) > MAX_TAGS:
        raise UserError(f"--tag: at most {MAX_TAGS} tags, not {len(tags)}")
    for tag in tags:
        _check_text("--tag", tag)
        if not tag.strip() or tag != tag.strip() or len(tag) > MAX_TAG:
            raise UserError(f"--tag {tag!a}: must be 1 to {MAX_TAG} characters, without spaces around")


def _check_env(request: Request, owner: str) -> None:
    check_names(request.env_names)
    for name in request.env_names:
        if name.startswith("HVD_TRANSFORMER_"):
            raise UserError(f"--env {name}: names that begin with HVD_TRANSFORMER_ are the launcher's own")
    if request.env_names and request.env_file is None:
        raise UserError(
            f"--env {request.env_names[0]}: needs --env-file, a private file with its value, which is read when the "
            "job starts"
        )
    if request.env_file is not None:
        if not request.env_names:
            raise UserError("--env-file: name the variables that the ranks get, with --env")
        read_values(Path(str(env_file_of(request))), request.env_names, env_owners(owner))


def env_file_of(request: Request) -> str | None:
    """Its absolute path."""
    if request.env_file is None:
        return None
    path = Path(request.env_file)
    with suppress(RuntimeError):  # ~ and a user whom this machine does not know: no such file
        path = path.expanduser()
    return str(Path(request.folder) / path)


def env_owners(owner: str) -> set[int]:
    """The users whose private files a job of `owner` may name: its own and, as it runs as that user, the service's."""
    users = {os.geteuid()}
    with suppress(KeyError):
        users.add(pwd.getpwnam(owner).pw_uid)
    return users


def _check_text(option: str, text: str) -> None:
    """Raise `UserError` for a text that no command line or path can have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{option} {text!a}: not valid text") from None
    if any(character < " " for character in text):
        raise UserError(f"{option} {text!a}: must not contain line breaks or other control characters")


def check_length(option: str, words: Sequence[str]) -> None:
    sizes = [len(word.encode()) for word in words]
    if sizes and (max(sizes) > _MAX_WORD or sum(sizes) > _MAX_WORDS):
        raise UserError(f"{option}: longer than the {_MAX_WORDS >> 10} KiB that a command line can have")

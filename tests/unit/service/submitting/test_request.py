"""What is wrong in a request whatever the configuration is: one line each that names the option."""

import os
import pwd
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hvd_transformer.errors import UserError
from hvd_transformer.service.submitting.request import Request, check_request, check_tags, env_owners

ME = pwd.getpwuid(os.geteuid()).pw_name


def check(**fields: Any) -> None:
    check_request(Request(**{"folder": "/folder", **fields}), ME)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"folder": "relative"}, "--folder relative: must be an absolute path"),
        ({"folder": "/a\0b"}, "--folder '/a\\x00b': must not contain line breaks or other control characters"),
        ({"words": ["data.source=\udc80"]}, "arguments 'data.source=\\udc80': not valid text"),
        ({"launch": ["--timeline", "a\nb"]}, "launch options 'a\\nb': must not contain line breaks"),
        ({"words": ["x" * 100_001]}, "arguments: longer than the"),
        ({"words": ["x" * 10_000] * 101}, "arguments: longer than the"),
        ({"num_ranks": 0}, "-np 0: must be from 1 to 1,000,000"),
        ({"num_ranks": -3}, "-np -3: must be from 1 to 1,000,000"),
        ({"min_ranks": 0}, "--min-np 0: must be from 1 to 1,000,000"),
        ({"after": [3, 10**18]}, "--after 1000000000000000000: must be from 1 to 999,999,999,999,999,999"),
        ({"after": [0]}, "--after 0: must be from 1 to"),
        ({"priority": 1001}, "--priority 1001: must be from -1,000 to 1,000"),
        ({"max_retries": -1}, "--max-retries -1: must be from 0 to 100"),
        ({"time_limit": -5.0}, "--time-limit -5: must be above 0 seconds, and at most ten years"),
        ({"time_limit": 0.0}, "--time-limit 0: must be above 0 seconds"),
        ({"name": ""}, "--name '': must be 1 to 80 letters, digits, dots, dashes and underscores, and begin with"),
        ({"name": "../x"}, "--name '../x': must be"),
        ({"name": ".hidden"}, "--name '.hidden': must be"),
        ({"name": "a/b"}, "--name 'a/b': must be"),
        ({"name": "x" * 81}, "--name 'xxx"),
        ({"tags": [" "]}, "--tag ' ': must be 1 to 100 characters, without spaces around"),
        ({"tags": ["x"] * 21}, "--tag: at most 20 tags, not 21"),
        ({"env_names": ["A=1"]}, "--env A=…: takes only the name"),
        ({"env_names": ["2A"]}, "--env '2A': not the name of an environment variable"),
        ({"env_names": ["A"]}, "--env A: needs --env-file, a private file with its value, which is read when the job"),
        ({"env_names": ["HVD_TRANSFORMER_CODE"]}, "--env HVD_TRANSFORMER_CODE: names that begin with"),
        ({"env_file": "x"}, "--env-file: name the variables that the ranks get, with --env"),
        ({"env_file": "x", "env_names": ["A"]}, "--env-file /folder/x: cannot be read: No such file or directory"),
    ],
)
def test_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        check(**fields)
    assert str(error.value).startswith(line)


def test_accepted(tmp_path: Path) -> None:
    file = tmp_path / "values.env"
    file.write_text("A=1")
    file.chmod(0o600)
    check(
        folder=str(tmp_path), name="a.B-1_", tags=["größer", "a=b"], priority=-1000, time_limit=0.5, max_retries=0,
        env_names=["A"], env_file="values.env", num_ranks=1, min_ranks=1, launch=["--gloo"], words=["x=é"],
    )  # fmt: skip


@pytest.mark.parametrize("fields", [{"np": 3}, {"num_ranks": "many"}, {"time_limit": float("nan")}, {"folder": None}])
def test_the_shape_is_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        check(**fields)


def test_tags_alone() -> None:
    check_tags(["a", "b"])
    with pytest.raises(UserError, match="control characters"):
        check_tags(["a\x1b[2J"])


def test_whose_private_files_a_job_may_name() -> None:
    assert env_owners("nobody-of-this-name") == {os.geteuid()}
    assert env_owners("nobody") == {os.geteuid(), pwd.getpwnam("nobody").pw_uid}

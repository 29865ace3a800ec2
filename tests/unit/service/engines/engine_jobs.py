"""Jobs for other schedulers, and commands that print what a test says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_transformer.service.engines.backend import EngineFault, Submission
from hvd_transformer.service.engines.commands import Commands
from hvd_transformer.service.jobs import Engine, Job, Needs, State


class FakeCommands(Commands):
    """`printed`: by the command's name, its output or its fault."""

    def __init__(self, printed: Mapping[str, str | EngineFault]) -> None:
        super().__init__()
        self.printed = printed
        self.called: list[tuple[str, ...]] = []
        self.texts: list[str] = []
        self.environments: list[Mapping[str, str]] = []

    def run(self, *words: str, text: str = "", env: Mapping[str, str] | None = None, cwd: str | None = None) -> str:
        self.called.append(words)
        self.texts.append(text)
        self.environments.append(env or {})
        answer = self.printed[words[0]]
        if isinstance(answer, EngineFault):
            raise answer
        return answer


def job(folder: Path, **fields: Any) -> Job:
    """Job 7 of ann, with the run directory `folder`/run."""
    given = {
        "id": 7, "name": "tiny", "owner": "ann", "state": State.STARTING, "priority": 0, "submitted": 1e9,
        "needs": Needs(2, 2), "output_dir": str(folder / "run"), "folder": str(folder), "words": (),
        "engine": Engine.SLURM,
    }  # fmt: skip
    return Job(**{**given, **fields})


def submission(of: Job, file: str, **fields: Any) -> Submission:
    """Its first attempt."""
    given = {
        "name": "hvd-abc-7-1", "claim": "hvd-abc-7", "service": "abc", "job": of, "number": 1, "file": file,
        "seconds": None, "values": {},
    }  # fmt: skip
    return Submission(**{**given, **fields})

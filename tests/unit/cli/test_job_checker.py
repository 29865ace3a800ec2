"""What the process that checks configurations answers when a check needs too much."""

import json

import pytest

from hvd_transformer.cli import job_checker


@pytest.mark.parametrize(("engine", "most"), [("hosts", 1024), ("slurm", 1024), ("kubernetes", 16384)])
def test_a_check_without_memory_names_its_own_limit(engine: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: object) -> None:
        raise MemoryError

    monkeypatch.setattr(job_checker, "check", fail)
    answer = json.loads(job_checker.answer_to(json.dumps({"engine": engine}).encode(), 30))
    assert answer == {"error": f"the configuration needs more than {most} MiB to be read"}

"""`hvd-transformer sweep` as users call it: through the queue of a service, and here through `launch`."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from command_service import Asked, fake_service, job
from commands import command
from conftest import rank_environment

from hvd_transformer.reporting.metrics_log import read_rows


def test_trials_are_jobs_where_a_service_runs(tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text(
        "preset: tiny\nranks: 2\nlaunch: --restarts 1\nparameters:\n  optimizer.lr: [0.1, 0.2, 0.3]\n"
        "  optimizer.betas: [[0.9, 0.95]]\n"
    )
    lost = [True]

    def submitted(asked: Asked) -> Any:
        given = dict(word.split("=") for word in asked.body["words"] if "=" in word)
        if given["optimizer.lr"] == "0.3" and lost.pop(0) if lost else False:
            return 403, {"error": "not today"}
        number = round(float(given["optimizer.lr"]) * 10)
        run = Path(given["output_dir"])
        run.mkdir(parents=True)
        loss = {"0.1": 2.0, "0.2": 1.0, "0.3": 3.0}[given["optimizer.lr"]]
        (run / "summary.json").write_text(json.dumps({"status": "finished", "seconds": 2, "valid_loss": loss}))
        state = "FAILED" if number == 3 else "SUCCEEDED"
        service.answers[f"GET jobs/{number}"] = job(number, state, reason="loss", output_dir=str(run))
        return 201, {"ids": [number], "jobs": [job(number)]}

    with fake_service(tmp_path / "state") as service:
        service.answers["POST jobs"] = submitted
        service.answers["GET jobs"] = {"items": [], "next": None}
        variables = {"HVD_TRANSFORMER_SERVER": str(tmp_path / "state"), "HVD_TRANSFORMER_TOKEN": ""}
        first = command("hvd-transformer", "sweep", "lr.yaml", folder=tmp_path, environment=variables)
        assert (first.returncode, first.stderr) == (2, "hvd-transformer: not today\n")
        done = command("hvd-transformer", "sweep", "lr.yaml", folder=tmp_path, environment=variables)
        bodies = service.bodies("POST jobs")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "hvd-transformer: job 3: loss\n"
    assert len(bodies) == 4  # the two jobs of the first command were waited for
    runs = tmp_path / "runs" / "lr"
    assert bodies[0] == {
        "words": [
            "--preset", "tiny", "optimizer.lr=0.1", "optimizer.betas=[0.9, 0.95]", f"output_dir={runs / 'trial-001'}",
        ],
        "launch": ["--restarts", "1"], "folder": str(tmp_path), "num_ranks": 2, "name": "trial-001",
        "tags": ["sweep=lr"],
    }  # fmt: skip
    assert [line.split() for line in done.stdout.splitlines()][-5:-1] == [
        ["TRIAL", "OPTIMIZER.LR", "OPTIMIZER.BETAS", "VALID_LOSS", "STATE", "SECONDS"],
        ["trial-002", "0.2", "[0.9,", "0.95]", "1", "finished", "2"],
        ["trial-001", "0.1", "[0.9,", "0.95]", "2", "finished", "2"],
        ["trial-003", "0.3", "[0.9,", "0.95]", "failed", "2"],
    ]


def test_a_sweep_whose_trials_all_failed_fails(tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text("preset: tiny\nparameters:\n  optimizer.lr: [0.1, 0.2]\n")
    numbers = iter((1, 2, 3, 4))

    def submitted(asked: Asked) -> Any:
        number, run = next(numbers), asked.body["words"][-1].removeprefix("output_dir=")
        service.answers[f"GET jobs/{number}"] = job(number, "FAILED", reason="loss", output_dir=run)
        return 201, {"ids": [number], "jobs": [job(number)]}

    with fake_service(tmp_path / "state") as service:
        service.answers["POST jobs"] = submitted
        service.answers["GET jobs"] = {"items": [], "next": None}
        variables = {"HVD_TRANSFORMER_SERVER": str(tmp_path / "state"), "HVD_TRANSFORMER_TOKEN": ""}
        done = command("hvd-transformer", "sweep", "lr.yaml", folder=tmp_path, environment=variables)
        for words, submissions in ((), 2), (("--retry-failed",), 4):
            command("hvd-transformer", "sweep", "lr.yaml", *words, folder=tmp_path, environment=variables)
            assert len(service.bodies("POST jobs")) == submissions
    assert done.returncode == 1
    assert [line.split()[-1] for line in done.stdout.splitlines()[-3:-1]] == ["failed", "failed"]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rung_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on my big red rug\n" * 60)
    settings = {
        "data.source": tmp_path / "text.txt", "data.cache_dir": tmp_path / "cache", "data.workers": 1,
        "data.tokenizer": "char", "data.vocab_size": "none", "data.sequence_length": 32, "training.epochs": 99,
        "training.log_every": 1, "training.device": "cpu", "optimizer.schedule": "constant",
    }  # fmt: skip
    (tmp_path / "lr.yaml").write_text(
        json.dumps(
            {
                "preset": "tiny",
                "settings": {key: str(value) for key, value in settings.items()},
                "parameters": {"optimizer.lr": [1e-5, 5e-3, 100.0]},
                "halving": {"steps": [6, 12], "factor": 2},
            }
        )
    )
    words = ["hvd-transformer", "sweep", "lr.yaml", "--local", "--json"]
    done = command(*words, folder=tmp_path, environment=rank_environment())
    assert done.returncode == 0, done.stderr
    best, *others = json.loads(done.stdout)["trials"]
    assert (best["trial"], best["steps"], best["state"]) == ("trial-002", "12", "finished")
    assert {(other["trial"], other["steps"], other["state"]) for other in others} == {
        ("trial-001", "6", "stopped early"), ("trial-003", "6", "stopped early"),
    }  # fmt: skip
    folder = tmp_path / "runs" / "lr"
    with (folder / "results.csv").open(newline="") as file:
        assert float(next(csv.DictReader(file))["valid_loss"]) == best["valid_loss"]
    assert (folder / "results.png").stat().st_size > 1000

    plain = command(
        "hvd-train", "--preset", "tiny", *(f"{key}={value}" for key, value in settings.items()), "optimizer.lr=0.005",
        "training.max_steps=12", f"output_dir={tmp_path / 'plain'}",
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    rows = [[row for row in read_rows(run) if "loss" in row] for run in (folder / "trial-002", tmp_path / "plain")]
    assert [row["step"] for row in rows[0]] == list(range(1, 13))  # each once
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    again = command(*words, folder=tmp_path, environment=rank_environment())
    assert json.loads(again.stdout)["trials"] == [best, *others]

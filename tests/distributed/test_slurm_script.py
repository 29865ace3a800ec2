"""The batch script of `launch --scheduler slurm`, run as Slurm does, with a stand-in for scontrol: it trains."""

import subprocess

import pytest
from click.testing import CliRunner
from conftest import rank_environment
from jobs import summary, tiny, write_corpus

from hvd_transformer.cli.launch import launch

pytestmark = pytest.mark.distributed


def test_the_batch_script_trains_to_the_end(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    corpus = write_corpus(tmp_path / "the text", train=2000)
    settings = [*tiny(corpus), f"output_dir={tmp_path}/a run", "training.max_steps=4", "checkpoint.every_steps=none"]
    words = ["-np", "1", "--scheduler", "slurm", "--output", str(tmp_path), "--", *settings]
    CliRunner().invoke(launch, words, catch_exceptions=False)
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames node7" ] && echo localhost\n')
    (commands / "scontrol").chmod(0o755)
    environment = rank_environment()
    environment |= {"PATH": f"{commands}:{environment['PATH']}", "SLURM_JOB_NODELIST": "node7", "SLURM_JOB_ID": "77"}
    ended = subprocess.run(
        ["bash", tmp_path / "job.sbatch"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = summary(tmp_path / "a run")
    assert (result["status"], result["world"], result["steps"]) == ("finished", 1, 4)

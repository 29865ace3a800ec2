"""Job files for schedulers, as `launch --scheduler` writes them."""

import yaml
from click.testing import CliRunner

from hvd_transformer.cli.launch import launch
from hvd_transformer.config import Config
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.scheduler.scheduled_job import ScheduledJob

TWO_HOSTS = ["-np", "4", "-H", "h1:2,h2:2"]
SECRET = "the-token-nobody-sees"


def job(*words: str, hosts: tuple[Host, ...] = (Host("h1", 2), Host("h2", 2)), **config: object) -> ScheduledJob:
    return ScheduledJob(hosts, ["--gloo"], [], words, Config.model_validate(config), 120)


def written(scheduler: str, *words: str) -> str:
    """What `launch` writes with these options and settings."""
    runner = CliRunner(env={"TOKEN": SECRET})
    result = runner.invoke(launch, ["--scheduler", scheduler, "--dry-run", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def documents(text: str) -> list[dict]:
    """Parsed by libyaml, an independent parser."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def pods(mpijob: dict) -> dict[str, dict]:
    """The pods of an MPIJob, by role."""
    return {role: replica["template"]["spec"] for role, replica in mpijob["spec"]["mpiReplicaSpecs"].items()}

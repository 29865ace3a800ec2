"""`hvd-transformer show`: everything about one job or run."""

import shlex
from collections.abc import Mapping
from typing import Any

import click

from hvd_transformer.cli import service_options


@click.command()
@click.argument("job", metavar="JOB|RUN")
@service_options.server
@service_options.as_json
def show(job: str, server: str | None, as_json: bool) -> None:
    """Show a job by its number, or a run by its directory or id: state, attempts, progress, metrics, checkpoints.

    Also works while the service is down.
    """
    source = service_options.reading(server)
    found, run = source.job_and_run(job)
    if as_json:
        service_options.print_json({"job": found, "run": run})
        return
    if found is not None:
        _show_job(found)
    if run is not None:
        _show_run(run, alone=found is None)


def _show_job(job: Mapping[str, Any]) -> None:
    from hvd_transformer.cli.service_tables import ago, duration, hosts_of, print_fields, print_table, ranks_of, until

    limit = job["time_limit"]
    print_fields(
        {
            "job": job["id"],
            "name": job["name"],
            "user": job["owner"],
            "state": job["state"],
            "why": job["reason"],
            "starts": until(job["estimated_start"]),
            "submitted": ago(job["submitted"]),
            "ended": ago(job["ended"]),
            "priority": job["priority"],
            "ranks": ranks_of(job["needs"]),
            "hosts": hosts_of(job["allocation"]),
            "output_dir": job["output_dir"],
            "folder": job["folder"],
            "arguments": shlex.join(job["words"]),
            "launch options": shlex.join(job["launch"]),
            "tags": ", ".join(job["tags"]),
            "after": ", ".join(map(str, job["after"])),
            "array": f"of job {job['array']}" if job["array"] else "",
            "time limit": duration(limit),
            "retries": f"{job['retries']} of {job['max_retries']}",
        }
    )
    if job["attempts"]:
        click.echo()
        print_table(
            ["attempt", "began", "ran for", "hosts", "steps", "code", "cause"],
            [
                [
                    attempt["number"],
                    ago(attempt["began"]),
                    duration(attempt["ended"] - attempt["began"]) if attempt["ended"] is not None else "running",
                    hosts_of(attempt["allocation"]),
                    _steps(attempt),
                    attempt["code"],
                    attempt["cause"],
                ]
                for attempt in job["attempts"]
            ],
        )


def _steps(attempt: Mapping[str, Any]) -> str:
    first, last = attempt["first_step"], attempt["last_step"]
    return "" if last is None else f"{first}-{last}" if first is not None else str(last)


def _show_run(run: Mapping[str, Any], alone: bool) -> None:
    from hvd_transformer.cli.service_tables import ago, print_fields, print_table, until

    if not alone:
        click.echo()
    speed = run["tokens_per_second"]
    print_fields(
        {
            "run": run["id"],
            **({"name": run["name"], "state": run["state"]} if alone else {}),
            "step": " of ".join(str(step) for step in (run["step"], run["total_steps"]) if step is not None),
            "ends": until(run["estimated_end"]) if run["state"] == "RUNNING" else "",
            "task": run["task"],
            "ranks": run["world"],
            "speed": "" if speed is None else f"{speed:,.0f} tokens/s",
            "updated": ago(run["updated"]),
            "late": run["late"],
            **run["metrics"],
        }
    )
    if run["checkpoints"]:
        click.echo()
        print_table(
            ["checkpoint", "size", "saved", ""],
            [
                [
                    checkpoint["step"],
                    f"{checkpoint['bytes'] / 2**20:,.1f} MiB",
                    ago(checkpoint["time"]),
                    " ".join(word for word in ("best", "latest") if checkpoint[word]),
                ]
                for checkpoint in run["checkpoints"]
            ],
        )

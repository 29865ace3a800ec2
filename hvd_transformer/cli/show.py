"""`hvd-transformer show`: everything about one job or run."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hvd_transformer.cli import service_options

_MOST_RANKS = 16  # in the table


@click.command()
@click.argument("job", metavar="JOB|RUN")
@service_options.server
@service_options.as_json
def show(job: str, server: str | None, as_json: bool) -> None:
    """Show a job by its number, or a run by its directory or id: state, attempts, progress, metrics, checkpoints.

    Also works while the service is down; a run directory needs no service.
    """
    source = service_options.reading(server, [job])
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
            "engine": job["engine"] if job["engine"] != "hosts" else "",
            "hosts": hosts_of(job["allocation"]),
            "output_dir": job["output_dir"],
            "folder": job["folder"],
            "arguments": shlex.join(job["words"]),
            "launch options": shlex.join(job["launch"]),
            "sbatch options": shlex.join(job["sbatch"]),
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
    if run["ranks"]:
        _show_ranks(run["ranks"])
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


def _show_ranks(ranks: Sequence[Mapping[str, Any]]) -> None:
    """In order; of many only those that are late and those with the most work."""
    from hvd_transformer.cli.service_tables import duration, print_table

    chosen = sorted(ranks, key=lambda rank: (not rank["late"], -(rank["work_seconds"] or 0.0)))[:_MOST_RANKS]
    click.echo()
    print_table(
        ["rank", "host", "step", "phase", "memory", "work per step", "heard from", ""],
        [
            [
                rank["rank"],
                rank["host"],
                rank["step"],
                rank["phase"],
                "" if rank["memory"] is None else f"{rank['memory'] / 2**20:,.0f} MiB",
                _work(rank),
                f"{duration(rank['age'])} ago",
                "late" if rank["late"] else "",
            ]
            for rank in sorted(chosen, key=lambda rank: int(rank["rank"]))
        ],
    )
    if len(ranks) > len(chosen):
        click.echo(f"{len(chosen)} of {len(ranks):,} ranks; --json has all")


def _work(rank: Mapping[str, Any]) -> str:
    """Such as 120 ms (1.50x): in parentheses relative to the other ranks."""
    seconds, ratio = rank["work_seconds"], rank["work_ratio"]
    if seconds is None:
        return ""
    return f"{1000 * seconds:.4g} ms" + ("" if ratio is None else f" ({ratio:.2f}x)")

"""Examines all hosts at once: asks their probes, measures clocks and network, and collects what is wrong.

Takes at most ten seconds, also where hosts do not answer.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hvd_transformer.errors import UserError
from hvd_transformer.launch.command import Ssh
from hvd_transformer.launch.doctor import findings, probe
from hvd_transformer.launch.doctor.conversation import Conversation, Conversations
from hvd_transformer.launch.doctor.findings import Answer, Finding, Job, Link

# Seconds after the start, at which each part is over; the command itself takes one before.
_CONNECTED, _ASKED, _MEASURED = 6.0, 6.7, 8.8
_LINK_SECONDS = 0.5
_CLOCK_ROUNDS = 3


class Examination(NamedTuple):
    """What was found; `answers`, `skews` and `links` are of the hosts that answered."""

    answers: dict[str, Answer]
    skews: dict[str, tuple[float, float]]  # seconds ahead of this host, and how far that may be wrong
    common: list[str]  # network interfaces
    links: list[Link]
    findings: list[Finding]


def examine(job: Job, ssh: Ssh, environment: Mapping[str, str]) -> Examination:
    """All that there is to know. Raises `UserError` where there is no ssh here."""
    return asyncio.run(_examine(job, ssh, environment, full=True))


def preflight(job: Job, ssh: Ssh, environment: Mapping[str, str]) -> str | None:
    """Looks for what would stop the job, in one question to each host.

    Returns the network interface to use where there is no choice: horovodrun need not search for it.

    Raises `UserError` that names the first host with a problem, and what to do.
    """
    found = asyncio.run(_examine(job, ssh, environment, full=False))
    for finding in found.findings:
        if finding.problem:
            raise UserError(f"{finding} (--no-preflight starts all the same)")
    return found.common[0] if len(found.common) == 1 else None


async def _examine(job: Job, ssh: Ssh, environment: Mapping[str, str], full: bool) -> Examination:
    start = asyncio.get_running_loop().time()

    def facts(talk: Conversation) -> Any:
        given = dict(environment)
        if not talk.local:
            given.pop("CUDA_VISIBLE_DEVICES", None)  # horovodrun does not send it to others
        question = {"environment": given, "cwd": job.cwd, "folders": dict(job.folders), "full": full}
        return talk.ask("facts", start + _CONNECTED, **question)

    async with Conversations((host.name for host in job.hosts), ssh, environment) as talks:
        answers = await talks.each(facts)
        found = list(findings.about_hosts(job, answers))
        here = next((host for host in answers if host in talks.local), os.uname().nodename)
        interfaces = {host: answer["interfaces"] for host, answer in answers.items() if host not in talks.local}
        common: list[str] = []
        if interfaces:
            interfaces[here] = probe.interfaces()  # the job is started from this host, also where it has no rank
            found += findings.about_network(job.network_interface, interfaces)
            common = findings.common_interfaces(job.network_interface, interfaces)
        skews, links = {}, []
        if full:
            skews = await talks.each(lambda talk: _skew(talk, start + _ASKED))
            found += findings.about_clocks(skews)
            found += findings.about_sharing(job.folders["output_dir"], await _sees_output(job, talks, start + _ASKED))
            if common:
                addresses = {host: answer["interfaces"][common[0]] for host, answer in answers.items()}
                links = await _ring(talks, addresses, start + _MEASURED)
                found += findings.about_links(common[0], links)
        return Examination(answers, skews, common, links, talks.silent + found)


async def _skew(talk: Conversation, until: float) -> tuple[float, float]:
    """Of the fastest of some questions: its clock, taken as read in the middle of the time that the answer took."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time()
        there = await talk.ask("clock", until)
        received = time.time()
        rounds.append(((received - sent) / 2, there - (sent + received) / 2))
    uncertainty, skew = min(rounds)
    return skew, uncertainty


async def _sees_output(job: Job, talks: Conversations, until: float) -> dict[str, bool]:
    """Which hosts see a file that this one makes where the output folder is, or will be."""
    folder = Path(job.folders["output_dir"]).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    marker = folder / f".hvd-transformer-{secrets.token_hex(8)}"
    try:
        marker.touch(exist_ok=False)
    except OSError:  # the host's own answer says so
        return {}
    try:
        return await talks.each(lambda talk: talk.ask("exists", until, path=str(marker)))
    finally:
        with suppress(OSError):
            marker.unlink()


async def _ring(talks: Conversations, addresses: Mapping[str, str], until: float) -> list[Link]:
    """The traffic of a ring allreduce, as `probe.link` makes it, between the hosts in their order."""
    ports = await talks.each(lambda talk: talk.ask("listen", until, address=addresses[talk.host]))
    hosts = list(ports)
    following = dict(zip(hosts, hosts[1:] + hosts[:1], strict=True))
    if len(hosts) < 2:
        return []

    def link(talk: Conversation) -> Any:
        target = following[talk.host]
        return talk.ask("link", until, address=addresses[target], port=ports[target], seconds=_LINK_SECONDS)

    answers = await talks.each(link)
    return [
        Link(
            source,
            target,
            answers[source].get("round_trip"),
            answers[target]["rate"] if target in answers else None,
            answers[source].get("error"),
        )
        for source, target in following.items()
        if source in answers
    ]

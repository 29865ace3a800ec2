"""Which queued jobs their owners may start now: the limits per user, as a pure function."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from hvd_transformer.service.jobs import Engine, Needs
from hvd_transformer.service.scheduling.placement import best_size, least_ranks
from hvd_transformer.service.scheduling.snapshot import Running, Waiting
from hvd_transformer.service.storage.settings import Limits


def within_limits(
    waiting: Sequence[Waiting],
    running: Sequence[Running],
    limits: Mapping[str | None, Limits],
    disk_bytes: Mapping[str, int] | None,
    elsewhere: Mapping[str, int] = MappingProxyType({}),
    can_start: Callable[[Waiting], bool] = lambda job: True,
) -> tuple[list[Waiting], dict[int, str]]:
    """The jobs that may start, and why each of the others may not. Elastic ones need no more ranks than the limit of
    slots lets them start with.

    `limits`: as `SettingsTable.all_limits` returns them; `disk_bytes`: what the run directories of each owner take,
    None if nobody has measured it yet. A job that waits for its owner's limit keeps no later and smaller job of that
    owner from starting. `elsewhere`: how many jobs of each owner other schedulers have; they take no slots. A job that
    the hosts `can_start` by no means, as those it needs are down, counts towards no limit.
    """
    if all(limit == Limits() for limit in limits.values()):
        return list(waiting), {}
    jobs = Counter(elsewhere)
    jobs.update(job.owner for job in running)
    slots = _in_use(running)
    allowed, reasons = [], {}
    for new in sorted(waiting, key=lambda job: (-job.priority, job.submitted)):
        limit = limits.get(new.owner, limits[None])
        on_disk = None if disk_bytes is None else disk_bytes.get(new.owner, 0)
        why = _over(new, limit, jobs[new.owner], slots[new.owner], on_disk)
        if why is None:
            if new.engine is Engine.HOSTS and limit.max_slots is not None:
                new = replace(new, needs=_within(new.needs, limit.max_slots - slots[new.owner]))
            if limit != Limits() and can_start(new):
                jobs[new.owner] += 1
                slots[new.owner] += new.needs.num_ranks if new.engine is Engine.HOSTS else 0
            allowed.append(new)
        else:
            reasons[new.id] = f"limit of {new.owner}: {why}"
    return allowed, reasons


def grown_within_limits(
    running: Sequence[Running], waiting: Iterable[Waiting], limits: Mapping[str | None, Limits]
) -> list[Running]:
    """The running jobs, of which elastic ones need no more ranks than their owner's limit of slots lets them grow to.

    `waiting`: those that may start; they come first.
    """
    if all(limit.max_slots is None for limit in limits.values()):
        return list(running)
    slots = _in_use(running)
    for new in waiting:
        slots[new.owner] += new.needs.num_ranks
    limited = []
    for job in sorted(running, key=lambda job: (-job.priority, job.began, job.id)):  # as they grow
        most = limits.get(job.owner, limits[None]).max_slots
        has = _slots(job)
        if most is not None and job.needs.num_ranks > has:
            more = max(0, min(job.needs.num_ranks - has, most - slots[job.owner]))
            slots[job.owner] += more
            job = replace(job, needs=replace(job.needs, num_ranks=has + more))
        limited.append(job)
    return limited


def _in_use(running: Sequence[Running]) -> Counter[str]:
    slots: Counter[str] = Counter()
    for job in running:
        slots[job.owner] += _slots(job)
    return slots


def _slots(job: Running) -> int:
    return sum(part.ranks for part in job.allocation)


def _within(needs: Needs, slots: int) -> Needs:
    """The needs of a job that may start, with at most so many ranks."""
    return needs if slots >= needs.num_ranks else replace(needs, num_ranks=best_size(needs, slots))


def _over(new: Waiting, limit: Limits, jobs: int, slots: int, disk_bytes: int | None) -> str | None:
    if limit.max_running is not None and jobs >= limit.max_running:
        return f"{jobs} jobs run or start, {limit.max_running} may"
    on_hosts, least = new.engine is Engine.HOSTS, least_ranks(new.needs)
    if on_hosts and limit.max_slots is not None and slots + least > limit.max_slots:
        needs = f"{'at least ' * (least < new.needs.num_ranks)}{least}"
        return f"{slots} slots in use, {limit.max_slots} may be; this job needs {needs}"
    if limit.disk_bytes is not None and disk_bytes is None:
        return "the runs are being measured"
    if limit.disk_bytes is not None and disk_bytes is not None and disk_bytes >= limit.disk_bytes:
        return f"runs take {disk_bytes / 2**30:.1f} GiB of disk, {limit.disk_bytes / 2**30:.1f} may be taken"
    return None

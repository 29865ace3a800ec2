"""Why a job waits, in the words that its user sees."""

from collections.abc import Mapping, Sequence

from hvd_transformer.errors import counted
from hvd_transformer.service.jobs import Host, Needs, State
from hvd_transformer.service.scheduling.placement import Shape, least_ranks

_MOST_NAMES = 5


def needed(needs: Needs, shape: Shape) -> str:
    """Such as `8 slots with 2 GPUs each in groups of 4 per host`."""
    least = least_ranks(needs)
    text = f"{'at least ' * (least < needs.num_ranks)}{counted(least, 'slot')}"
    if shape.gpus:
        text += f" with {counted(shape.gpus, 'GPU')}{' each' * (least > 1)}"
    return text + f" in groups of {shape.group} per host" * (shape.group > 1)


def resources(needs: Needs, shape: Shape, free: int) -> str:
    return f"resources: needs {needed(needs, shape)}, {free} {'is' if free == 1 else 'are'} free"


def outside(needs: Needs, shape: Shape, room: int) -> str:
    return f"resources: needs {needed(needs, shape)}, launches outside the service leave {room}"


def unusable(hosts: Sequence[Host]) -> str:
    """Which hosts the job would need, and why if it is a single one."""
    down = [host for host in hosts if host.down]
    drained = [host.name for host in hosts if host.drained and not host.down]
    parts = []
    if len(down) == 1:
        why = down[0].down.partition("; ")[0].removeprefix(f"host {down[0].name}: ")
        parts.append(f"host down: {down[0].name} ({why})")
    elif down:
        parts.append(f"hosts down: {_names([host.name for host in down])}")
    if drained:
        parts.append(f"host{'s' * (len(drained) > 1)} drained: {_names(drained)}")
    return "; ".join(parts)


def reserved(job: int) -> str:
    return f"reserved for job {job}"


def behind_priority(job: int) -> str:
    return f"priority: behind job {job}"


def behind_owner(job: int, owner: str) -> str:
    return f"fair share: behind job {job} of {owner}"


def dependencies(others: Mapping[int, State]) -> str:
    """Why a job waits for others, of which these have not succeeded."""
    words = [
        f"job {job}, which {'was cancelled' if state is State.CANCELLED else 'failed'} (retry it)"
        if state in (State.FAILED, State.CANCELLED)
        else f"job {job}"
        for job, state in sorted(others.items())[:8]
    ]
    return f"waits for {', '.join(words)}{', …' if len(others) > 8 else ''}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + f" and {more} more" * (more > 0)

"""The costs of the launcher by the number of hosts, with 8 ranks each (`benchmarks.launch_hosts`): CPU-seconds of the
doctor, of the start until all ranks run, of watching them, and of a restart; connections, messages and memory."""

from benchmarks import launch_hosts
from benchmarks.growth.fit import Point

_PHASES = ("doctor", "preflight", "start", "running", "restart")


def hosts(number: int) -> dict[str, Point]:
    """Of a job that runs for ten seconds, loses a host, restarts and ends. Needs root."""
    costs = launch_hosts.hosts(number)
    found = {f"{phase}: CPU": costs[f"{phase}: CPU s"] for phase in _PHASES}
    found["ssh connections"] = sum(costs[f"{phase}: ssh"] for phase in _PHASES[1:])
    found["running: messages"] = 10 * costs["running: messages"] / costs["running: s"]
    found["memory, bytes"] = costs["memory"]
    return {name: Point(number, [value]) for name, value in found.items()}

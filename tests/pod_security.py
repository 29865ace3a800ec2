"""What PodSecurity's level "restricted" refuses.

Source: Kubernetes documentation, "Pod Security Standards", v1.34: the baseline's controls and those of "restricted"
(of two controls of one field the stricter one).
"""

from collections.abc import Callable, Iterator
from typing import Any

Pod = dict[str, Any]  # a PodSpec
Rule = Callable[[Pod], bool]  # whether the pod keeps it

_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
_SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}  # fmt: skip
_HANDLERS = {"probe": ("livenessProbe", "readinessProbe", "startupProbe"), "hook": ("postStart", "preStop")}


def _containers(pod: Pod) -> Iterator[dict[str, Any]]:
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        yield from pod.get(kind, [])


def _contexts(pod: Pod) -> list[dict[str, Any]]:
    """The containers' own security contexts."""
    return [container.get("securityContext", {}) for container in _containers(pod)]


def _pod_and_contexts(pod: Pod) -> list[dict[str, Any]]:
    return [pod.get("securityContext", {}), *_contexts(pod)]


def _effective(pod: Pod) -> list[dict[str, Any]]:
    """The containers' security contexts, with what they inherit from the pod."""
    return [{**pod.get("securityContext", {}), **context} for context in _contexts(pod)]


def _handlers(pod: Pod) -> Iterator[dict[str, Any]]:
    """The actions of probes and of lifecycle hooks."""
    for container in _containers(pod):
        places = [container.get(name, {}) for name in _HANDLERS["probe"]]
        places += [container.get("lifecycle", {}).get(name, {}) for name in _HANDLERS["hook"]]
        for place in places:
            yield from (place[action] for action in ("httpGet", "tcpSocket") if action in place)


RESTRICTED: dict[str, Rule] = {
    "HostProcess": lambda pod: not any(
        context.get("windowsOptions", {}).get("hostProcess") for context in _pod_and_contexts(pod)
    ),
    "Host Namespaces": lambda pod: not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
    "Privileged Containers": lambda pod: not any(context.get("privileged") for context in _contexts(pod)),
    "Capabilities": lambda pod: all(
        "ALL" in context.get("capabilities", {}).get("drop", [])
        and set(context["capabilities"].get("add", [])) <= {"NET_BIND_SERVICE"}
        for context in _contexts(pod)
    ),
    "Volume Types": lambda pod: all(volume.keys() - {"name"} <= _VOLUMES for volume in pod.get("volumes", [])),
    "Host Ports": lambda pod: not any(
        port.get("hostPort") for container in _containers(pod) for port in container.get("ports", [])
    ),
    "Host Probes / Lifecycle Hooks": lambda pod: not any(handler.get("host") for handler in _handlers(pod)),
    "AppArmor": lambda pod: all(
        context.get("appArmorProfile", {}).get("type") in (None, "RuntimeDefault", "Localhost")
        for context in _pod_and_contexts(pod)
    ),
    "SELinux": lambda pod: all(
        options.get("type", "") in _SELINUX and not options.get("user") and not options.get("role")
        for options in (context.get("seLinuxOptions", {}) for context in _pod_and_contexts(pod))
    ),
    "/proc Mount Type": lambda pod: all(
        context.get("procMount") in (None, "Default") for context in _contexts(pod)
    ),
    "Sysctls": lambda pod: all(
        sysctl["name"] in _SYSCTLS for sysctl in pod.get("securityContext", {}).get("sysctls", [])
    ),
    "Privilege Escalation": lambda pod: all(
        context.get("allowPrivilegeEscalation") is False for context in _contexts(pod)
    ),
    "Running as Non-root": lambda pod: all(context.get("runAsNonRoot") is True for context in _effective(pod)),
    "Running as Non-root user": lambda pod: all(context.get("runAsUser") != 0 for context in _pod_and_contexts(pod)),
    "Seccomp": lambda pod: all(
        context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost")
        for context in _effective(pod)
    ),
}  # fmt: skip


def refused(pod: Pod) -> list[str]:
    """The controls that refuse the pod."""
    return [control for control, kept in RESTRICTED.items() if not kept(pod)]

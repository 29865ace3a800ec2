"""What the hosts' answers mean: each fault in a made-up answer is one finding, about that host."""

from copy import deepcopy
from typing import Any

import pytest

from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.launch.connection.ssh import why_refused
from hvd_transformer.launch.doctor.findings import (
    GIB,
    MIB,
    Finding,
    Job,
    Link,
    about_clocks,
    about_hosts,
    about_links,
    about_network,
    about_sharing,
    choose_interfaces,
    common_interfaces,
)
from hvd_transformer.launch.horovodrun_command import Horovodrun
from hvd_transformer.launch.hostfile import parse_hosts

ANSWER: dict[str, Any] = {
    "python": "3.11.7",
    "machine": "x86_64",
    "versions": {"hvd-transformer": "0.1.0", "torch": "2.13.0", "horovod": "0.28.1", "mpi4py": "4.1.2"},
    "source": "0123456789ab",
    "memory": 64 * GIB,
    "memory_free": 60 * GIB,
    "interfaces": {"eth0": "10.0.0.1"},
    "cwd": True,
    "folders": {
        label: {"exists": True, "writable": True, "free": 100 * GIB}
        for label in ("output_dir", "data.source", "data.cache_dir", "/tmp")
    },
    "horovod": {"features": ["gloo", "MPI"], "torch": "2.13.0", "mpi": "/lib/libmpi.so.40"},
    "mpi4py": {"version": "Open MPI v4.1.8", "mpi": "/lib/libmpi.so.40"},
}


def job(hosts: str = "a:2,b:2,c:2", *settings: str) -> Job:
    return Job.of(Horovodrun(parse_hosts(hosts)), load(None, None, [*settings, "output_dir=runs/x"]))


def found(changed: dict[str, Any], host: str = "c") -> list[Finding]:
    """The findings for three hosts, one of which gives a different answer: keys and their values."""
    answers = {name: deepcopy(ANSWER) for name in ("a", "b", "c")}
    for key, value in changed.items():
        *parents, last = key.split("/")
        place = answers[host]
        for parent in parents:
            place = place[parent]
        place[last] = value
    return list(about_hosts(job(), answers))


def test_hosts_that_agree_have_no_findings() -> None:
    assert found({}) == []


@pytest.mark.parametrize("host", ["a", "b", "c"])
@pytest.mark.parametrize(
    ("key", "value", "message", "cure"),
    [
        ("python", "3.10.2", "Python is 3.10.2, but 3.11.7 on ", "Python 3.11.7"),
        ("versions/torch", "2.1.0", "torch is 2.1.0, but 2.13.0 on ", "`pip install torch==2.13.0`"),
        ("versions/horovod", "0.27.0", "horovod is 0.27.0, but 0.28.1 on ", "build_horovod.sh"),
        ("versions/horovod", None, "horovod is not installed", "build_horovod.sh"),
        ("versions/hvd-transformer", None, "hvd-transformer is not installed", "same checkout"),
        ("versions/mpi4py", None, "mpi4py is not installed", "`pip install mpi4py==4.1.2`"),
        ("source", "ba9876543210", "the source of hvd-transformer is ba9876543210, but 0123456789ab on ", "checkout"),
        ("horovod/features", ["gloo"], "what Horovod was built with is gloo, but gloo MPI on ", "build_horovod.sh"),
        (
            "horovod/torch",
            "2.12.0",
            "Horovod was built for torch 2.12.0, and torch 2.13.0 is installed",
            "rebuild Horovod",
        ),
        ("mpi4py/mpi", "/other/libmpi.so", "loads the MPI library /lib/libmpi.so.40, mpi4py /other/lib", "single MPI"),
        ("cwd", False, "the folder ", "start from a folder that all hosts have"),
        ("folders/output_dir/free", 15 * MIB, "the disk of output_dir=runs/x is full", "free some space"),
        ("folders//tmp/free", 0, "the disk of /tmp is full", "free some space"),
        ("folders/output_dir/writable", False, "output_dir=runs/x cannot be written to", "change its owner"),
        ("folders/data.source/exists", False, "data.source=python-docs is not there", "copy it there"),
    ],
)
def test_one_host_that_differs_is_named_with_the_cure(host: str, key: str, value: Any, message: str, cure: str) -> None:
    changed = {key: value} if "//" not in key else {}
    if not changed:
        changed = {"folders": {**ANSWER["folders"], "/tmp": {**ANSWER["folders"]["/tmp"], "free": value}}}
    [finding] = [finding for finding in found(changed, host) if message in finding.message]
    assert finding.host == host
    assert cure in finding.cure
    assert finding.problem
    assert len(str(finding).splitlines()) == 1


def test_without_a_majority_the_first_host_is_the_model() -> None:
    answers = {"a": deepcopy(ANSWER), "b": {**deepcopy(ANSWER), "python": "3.12.1"}}
    [finding] = about_hosts(job("a,b"), answers)
    assert finding[:2] == ("b", "Python is 3.12.1, but 3.11.7 on a")


def test_a_quick_answer_needs_no_build() -> None:
    answer = {key: value for key, value in ANSWER.items() if key not in ("horovod", "mpi4py")}
    assert list(about_hosts(job("a"), {"a": answer})) == []


def test_what_only_slows_a_job_is_no_problem() -> None:
    for changed in (
        {"memory_free": 500 * MIB},
        {"folders/output_dir/free": 500 * MIB},
    ):
        [finding] = found(changed)
        assert (finding.host, finding.problem) == ("c", False)


NETWORK = {
    "a": {"docker0": "172.17.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"},
    "b": {"docker0": "172.17.0.1", "ib0": "10.1.0.2", "eth0": "10.0.0.2"},
    "c": {"docker0": "172.17.0.1", "eth0": "10.0.0.3", "ib0": "10.1.0.3"},
}


def test_the_common_interface_has_an_address_of_its_own_on_each() -> None:
    assert common_interfaces(None, NETWORK)[0] == "eth0"
    assert common_interfaces("ib0", NETWORK) == ["ib0"]
    assert common_interfaces("eth7,ib0", NETWORK) == ["ib0"]
    assert common_interfaces("docker0", NETWORK) == []
    assert list(about_network(None, NETWORK)) == []
    assert list(about_network("ib0", NETWORK)) == []


def test_hosts_that_share_none_of_the_wanted_interfaces_are_named() -> None:
    mixed = {
        "a": {"eth0": "10.0.0.1"}, "b": {"eth0": "10.0.0.2", "ib0": "10.1.0.2"}, "c": {"ib0": "10.1.0.3"}, "d": {},
    }  # fmt: skip
    assert [(finding.host, finding.message) for finding in about_network("eth0,ib0", mixed)] == [
        ("c", "none of the network interfaces eth0,ib0 in common with the others: it has ib0"),
        ("d", "no network interface eth0,ib0: it has none"),
    ]
    with pytest.raises(UserError, match="^host c: none of the network interfaces eth0,ib0 in common .* it has ib0; "):
        choose_interfaces("eth0,ib0", mixed, {})
    with pytest.raises(UserError, match="^host c: no network interface in common with the others: it has ib0; "):
        choose_interfaces(None, mixed, {})


def test_the_wanted_interfaces_or_the_one_that_ssh_uses_are_chosen() -> None:
    both = {
        "a": {"docker0": "172.17.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"},
        "b": {"docker0": "172.17.0.1", "eth0": "10.0.0.2", "ib0": "10.1.0.2", "eth7": "10.7.0.1"},
    }
    assert choose_interfaces("eth7,ib0,eth0", both, {}) == "ib0,eth0"
    assert choose_interfaces(None, both, {"b": "10.1.0.2"}) == "ib0"
    assert common_interfaces(None, both, {"b": "10.1.0.2"}) == ["ib0", "eth0"]
    assert choose_interfaces(None, both, {"b": "192.0.2.1"}) == "eth0"  # as behind a jump host


def test_the_host_without_the_interface_is_named() -> None:
    apart = {**NETWORK, "b": {"docker0": "172.17.0.1", "net0": "10.0.0.2"}, "c": {"eth0": "10.0.0.3"}}
    assert [finding.host for finding in about_network("eth0", apart)] == ["b"]
    [finding] = about_network(None, {**apart, "b": {"net0": "10.0.0.2"}})
    assert (finding.host, finding.message[-4:]) == ("b", "net0")
    only_docker = {host: {"docker0": "172.17.0.1"} for host in "ab"}
    assert [finding.host for finding in about_network(None, only_docker)] == ["a", "b"]
    assert [finding.host for finding in about_network(None, {"a": {}, "b": {}})] == ["a", "b"]


def test_a_clock_counts_as_wrong_only_beyond_what_the_measurement_can_tell() -> None:
    skews = {"a": (0.9, 0.0), "b": (-90.0, 0.5), "c": (3.0, 2.5), "d": (3.0, 0.1)}
    assert [finding[:2] for finding in about_clocks(skews)] == [
        ("b", "its clock is 90.0 s behind this host's"),
        ("d", "its clock is 3.0 s ahead of this host's"),
    ]


def test_a_folder_that_is_not_shared() -> None:
    [finding] = about_sharing("runs/x", {"a": True, "b": False})
    assert finding.host == "b"
    assert "output_dir=runs/x" in finding.message


def test_links() -> None:
    fast = [Link("a", "b", 1e-4, 1e9, None), Link("b", "c", 1e-4, 0.9e9, None), Link("c", "a", 1e-4, 0.8e9, None)]
    assert list(about_links("eth0", fast)) == []
    [slow] = about_links("eth0", [*fast[:2], Link("c", "a", 1e-3, 1.2e7, None)])
    assert (slow.host, slow.problem) == ("a", False)
    assert slow.message == "the link from c over eth0 has 0.096 Gbit/s, another link has 8 Gbit/s"
    [cut] = about_links("eth0", [*fast[:2], Link("c", "a", None, None, "timed out")])
    assert (cut.host, cut.problem) == ("a", True)
    assert cut.message == "c cannot connect to it over eth0: timed out"


def test_what_ssh_says_in_other_words_is_passed_on() -> None:
    message, cure = why_refused("b", "banner\nBad owner or permissions on /root/.ssh/config\n")
    assert message == "cannot be reached by ssh: Bad owner or permissions on /root/.ssh/config"
    assert "`ssh b true`" in cure
    assert why_refused("b", "")[0] == "cannot be reached by ssh: no answer"

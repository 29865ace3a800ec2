"""Every common format of a host file gives hosts and slots; anything else is one error that names file and line."""

import json
import os
import random
import re
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import REPOSITORY
from hypothesis import example, given
from hypothesis import strategies as st

from hvd_transformer.errors import UserError
from hvd_transformer.launch.host_pool import from_script
from hvd_transformer.launch.hostfile import Host, assign, parse_hostfile, parse_hosts, read_hostfile


def refused(text: str) -> str:
    """The error message for this host file."""
    with pytest.raises(UserError) as caught:
        parse_hostfile(text, "hosts")
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith("hosts")
    return message


def hosts(given: Iterable[tuple]) -> list[Host]:
    return [Host(*host) for host in given]


LINES = {
    "host slots=2": [("host", 2)],
    "host slots = 2 max_slots=4": [("host", 2)],
    "host slots=2 max-slots=2": [("host", 2)],
    "host:2": [("host", 2)],
    "host": [("host", 1)],
    "10.0.0.1:8": [("10.0.0.1", 8)],
    "a.b-c_d:1024": [("a.b-c_d", 1024)],
    "[fe80::1]:2": [("fe80::1", 2)],
    "[fe80::1] slots=3": [("fe80::1", 3)],
    "[::1]": [("::1", 1)],
    "node[01-03]": [("node01", 1), ("node02", 1), ("node03", 1)],
    "node[01-02,07]:2": [("node01", 2), ("node02", 2), ("node07", 2)],
    "node[9-11].net slots=4": [("node9.net", 4), ("node10.net", 4), ("node11.net", 4)],
    "r[1-2]n[1-2]": [("r1n1", 1), ("r1n2", 1), ("r2n1", 1), ("r2n2", 1)],
    "  host:2\t# the fast one": [("host", 2)],
    "host slots=2 gpus=4,5": [("host", 2, (4, 5))],
    "host:2 gpus = 7,0,3 # three": [("host", 2, (7, 0, 3))],
    "host gpus=1023": [("host", 1, (1023,))],
    "node[1-2] gpus=0,1 slots=1 max_slots=2": [("node1", 1, (0, 1)), ("node2", 1, (0, 1))],
    "# nothing\n\n \t\nhost:2\r\nother\r\n": [("host", 2), ("other", 1)],
}


@pytest.mark.parametrize("text", LINES)
def test_each_form(text: str) -> None:
    assert parse_hostfile(text, "hosts") == hosts(LINES[text])


def test_a_name_alone_is_one_slot_each_time() -> None:
    """The machine files of PBS, SGE and LSF."""
    text = "n1\nn2\nn1  # again\n\nN1\nn3:4\nn2\n"
    assert parse_hostfile(text, "hosts") == hosts([("n1", 3), ("n2", 2), ("n3", 4)])


OPTIONS = {
    "h1:2,h2:2": [("h1", 2), ("h2", 2)],
    " h1:2 , h2 ": [("h1", 2), ("h2", 1)],
    "node[01-02,05]:2,other:1": [("node01", 2), ("node02", 2), ("node05", 2), ("other", 1)],
    "[fe80::1]:2,h2": [("fe80::1", 2), ("h2", 1)],
}


@pytest.mark.parametrize("text", OPTIONS)
def test_the_option(text: str) -> None:
    assert parse_hosts(text) == hosts(OPTIONS[text])


@pytest.mark.parametrize("text", ["", ",", "h1:2,", "h1:2,,h2", "h1 slots=2", "h1:0", "h1:2,h1:2", "-h:2", "h1:2\nh2"])
def test_a_malformed_option_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^-H .*$"):
        parse_hosts(text)


MALFORMED = {
    "host:0": "line 1: '0' slots; a host has 1 to 1024",
    "\nhost:-1": "line 2: '-1' slots",
    "host slots=999999999999999999999": "slots; a host has 1 to 1024",
    "host slots=": "'' slots",
    "host slots=two": "'two' slots",
    "host:2.5": "'2.5' slots",
    "host:²": "'\\xb2' slots",
    "host 2": "'2' after the host; allowed are: host, host:2, host slots=2",
    "host:2 slots=2": "slots is given twice",
    "host slots=2 slots=3": "slots is given twice",
    "host slots=4 max_slots=2": "max_slots=2 is below slots=4",
    "host slots=4 cpus=2": "'cpus=2' after the host",
    "a\nhost gpus=1,1": "line 2: gpus=1,1: names GPU 1 twice",
    "a\nhost slots=2 gpus=3": "line 2: gpus=3 is fewer than slots=2; every slot needs a GPU of its own",
    "host gpus=-1": "gpus='-1': must be numbers from 0 to 1023 without spaces, as in gpus=0,1",
    "host gpus=": "gpus='': must be numbers",
    "host gpus=0,": "gpus='0,': must be numbers",
    "host gpus=0, 1": "gpus='0,': must be numbers",
    "host gpus=GPU-1": "gpus='GPU-1': must be numbers",
    "host gpus=1024": "gpus='1024': must be numbers from 0 to 1023",
    "host gpus=\u0661": "must be numbers",
    "host gpus=0 gpus=1": "gpus is given twice",
    "fe80::1": "'fe80::1': more than one colon; put an IPv6 address in brackets",
    "[fe80::x]:2": "'fe80::x' is not an IPv6 address",
    "[fe80::1]2": "'[fe80::1]2': allowed are",
    "-oProxyCommand=x": "is not a host name",
    "user@host:2": "'user@host' is not a host name",
    "host;reboot": "is not a host name",
    "höst": "'h\\xf6st' is not a host name",
    "node[1-": "'node[1-' is not a host name",
    "node[]": "[]: not a range of numbers such as [01-08]",
    "node[8-1]": "[8-1]: not a range of numbers",
    "node[a-c]": "[a-c]: not a range of numbers",
    "node[0-99999]": "[0-99999]: more than 10000 hosts",
    "a[0-999]b[0-999]": "'a[0-999]b[0-999]' is 1000000 hosts; at most 10000",
    "a\nb\nA:1": "line 3: host A is listed already: hosts, line 1",
    "a slots=1\nb\na": "line 3: host a is listed already: hosts, line 1",
    "a gpus=0\na gpus=1": "line 2: host a is listed already: hosts, line 1",
    "a\na gpus=1": "line 2: host a is listed already: hosts, line 1",
    "a[1-2]\na1": "line 2: host a1 is listed already: hosts, line 1",
    "b\n" + "a\n" * 1025: "line 1026: '1025' slots; a host has 1 to 1024",
    "node[1-3]\nnode2:4": "line 2: host node2 is listed already: hosts, line 1",
    "a[0-6000]\nb[0-6000]": "line 2: more than 10000 hosts",
    "": "no hosts",
    "# only\n\n# comments": "no hosts",
    "x" * 300: "is not a host name",
    "{": "line 1: not valid JSON",
    "{}": 'must hold "version": "1.0"',
    '{"version": "1.0"}': "server_list must be a list of servers",
    '{"version": "1.0", "server_list": [3]}': "server_list[0]: must hold server_id",
    '{"version": "1.0", "server_list": [{"server_id": "a"}]}': "server_list[0]: device must be a list",
    '{"version": "1.0", "server_list": [{"server_id": "a b", "device": [1]}]}': "[0]: 'a b' is not a host name",
    '{"version": "1.0", "server_count": 2, "server_list": [1]}': "1 servers, which differs from server_count",
    '{"a":' * 100000: "not a rank table",
    '{"version": ' + "1" * 5000 + "}": "not a rank table",
}


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: ascii(text)[:30])
def test_a_malformed_line_is_named_with_what_is_allowed(text: str) -> None:
    assert MALFORMED[text] in refused(text)


def test_a_hundred_host_files_with_one_damaged_line_each() -> None:
    """The damage is always found, with its line."""
    rng = random.Random(4)
    for _ in range(150):
        lines = [rng.choice([f"n{at}:2", f"n{at} slots=2", f"n{at}", f"r{at}x[1-3]", "# text"]) for at in range(9)]
        broken = rng.randrange(len(lines))
        place = rng.choice(["host:2", "host slots=2", "host[1-2]:2"])
        at = rng.randrange(len(place) + 1)
        lines[broken] = place[:at] + rng.choice(";@!$&*()<>?/\\|^~`'\"é{}") + place[at:]
        assert refused("\n".join(lines)).startswith(f"hosts, line {broken + 1}: ")


VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(), st.sampled_from(["1.0", "n1", {}])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["version", "server_count", "server_list", "server_id", "device"]), inner),
    ),
    max_leaves=12,
)
TABLES = st.fixed_dictionaries({}, optional={"version": st.just("1.0"), "server_list": VALUES, "server_count": VALUES})


@given(
    st.one_of(
        st.text(),
        st.text(alphabet="n1[]-,: #=\nslotgpumax_{}\"'"),
        st.lists(st.sampled_from(list(LINES))).map("\n".join),
        TABLES.map(json.dumps),
    )
)
@example('{"version": "1.0", "server_list": [{"server_id": "n", "device": [{}, {}]}]}')
def test_any_text_gives_hosts_or_one_line(text: str) -> None:
    try:
        found = parse_hostfile(text, "hosts")
    except UserError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert found
    assert len({host.name for host in found}) == len(found)
    assert all(1 <= host.slots <= 1024 for host in found)
    assert all(not host.gpus or len(set(host.gpus)) == len(host.gpus) >= host.slots for host in found)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"host:2\nh\xf6st:2\n")
    (tmp_path / "large").write_bytes(b"# \n" * 400_000)
    for name, message in {
        "missing": "missing: cannot be read: No such file or directory",
        ".": "cannot be read: Is a directory",
        "latin": "latin, line 2: not valid UTF-8",
        "large": "larger than 1 MiB",
        "a\0b": "null byte",
    }.items():
        with pytest.raises(UserError, match=f"^[^\n]*{message}[^\n]*$"):
            read_hostfile(tmp_path / name)


def test_a_byte_order_mark_is_no_part_of_the_name(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfhost:2\r\n")
    assert read_hostfile(tmp_path / "hosts") == [Host("host", 2)]


EXAMPLES = {
    "localhost": [("localhost", 2)],
    "two-nodes": [("node1", 4), ("node2", 4)],
    "eight-nodes-mixed": [
        *((f"node0{number}", 8) for number in (1, 2, 3, 4)),
        *((f"node0{number}", 4) for number in (5, 7, 8)),
        ("login.cluster", 2),
    ],
    "rank-table.json": [("10.0.0.1", 2), ("10.0.0.2", 2)],
}


def test_every_example_is_parsed() -> None:
    files = [path for path in (REPOSITORY / "hostfiles").iterdir() if path.suffix != ".sh"]
    assert {path.name: read_hostfile(path) for path in files} == {name: hosts(EXAMPLES[name]) for name in EXAMPLES}


def test_the_discovery_script_names_the_hosts_that_answer(tmp_path: Path) -> None:
    text = (REPOSITORY / "hostfiles" / "discover.sh").read_text()
    listed = '"127.0.0.2:3 localhost:2 no-such-host.invalid:1 127.0.0.1:8"'
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in {"hosts": listed, "port": server.getsockname()[1]}.items():
            text, count = re.subn(rf"^{name}=.*", f"{name}={value}", text, flags=re.MULTILINE)
            assert count == 1
        (tmp_path / "discover.sh").write_text(text)
        (tmp_path / "discover.sh").chmod(0o755)
        found = from_script(tmp_path / "discover.sh", os.environ)()
    assert found == [Host("127.0.0.1", 8), Host("localhost", 2)]


def test_a_rank_table_from_another_tool(tmp_path: Path) -> None:
    servers = [
        {"server_id": f"10.0.0.{at}", "device": [{"device_id": str(rank)} for rank in range(8)]} for at in (1, 2)
    ]
    (tmp_path / "table.json").write_text(json.dumps({"version": "1.0", "server_list": servers}))
    assert read_hostfile(tmp_path / "table.json") == [Host("10.0.0.1", 8), Host("10.0.0.2", 8)]


def test_slots_are_trimmed_to_the_ranks() -> None:
    assert assign([Host("localhost", 4)], 2) == [Host("localhost", 2)]
    three = [Host("a", 4), Host("b", 4), Host("c", 4)]
    assert assign(three, 12) == three
    assert assign(three, 6) == [Host("a", 4), Host("b", 2)]
    assert assign(three, 1) == [Host("a", 1)]
    assert assign([Host("a", 4, (4, 5, 6, 7)), Host("b", 1, (0,))], 2) == [Host("a", 2, (4, 5, 6, 7))]


def test_more_ranks_than_slots_names_both_numbers() -> None:
    with pytest.raises(UserError, match="^-np 9: the hosts have 8 slots$"):
        assign([Host("a", 4), Host("b", 4)], 9)

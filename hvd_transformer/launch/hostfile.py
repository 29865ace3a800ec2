"""Hosts and their slots, from `-H` or from a host file in any common format."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from ipaddress import IPv6Address
from pathlib import Path
from typing import NamedTuple

from hvd_transformer.errors import UserError

MAX_SLOTS = 1024
MAX_HOSTS = 10_000
MAX_GPUS = 1024
_MAX_BYTES = 1 << 20
_FORMS = "allowed are: host, host:2, host slots=2, node[01-08]:2, [fe80::1]:2"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")  # no leading dash: ssh would take it for an option
_SLOT_WORD = re.compile(r"(slots|max[-_]slots)=(.*)")


class Host(NamedTuple):
    """A host and its number of slots (ranks). An IPv6 address is stored without brackets.

    `gpus`: the numbers of the GPUs that its ranks see, which take them in this order. Empty: those that the host shows.
    """

    name: str
    slots: int
    gpus: tuple[int, ...] = ()


def parse_hosts(text: str) -> list[Host]:
    """The hosts of an option such as `-H host:2,node[01-08]:4`.

    Raises `UserError`, which names the malformed item.
    """
    items = re.split(r",(?![^\[\]]*\])", text)  # not at commas within a range
    places = [(f"-H {_quoted(item)}", item.strip()) for item in items]
    return _unique((where, host, False) for where, item in places for host in _hosts([item], where))


def read_hostfile(file: Path) -> list[Host]:
    """The hosts of a file in Horovod's, Open MPI's or MPICH's format, or of a MindSpore rank table.

    Raises `UserError`, which names file and line, also if the file cannot be read.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL in the path
        raise UserError(f"--hostfile: {error}") from None
    if len(data) > _MAX_BYTES:
        raise UserError(f"{file}: larger than 1 MiB; not a host file")
    try:
        return parse_hostfile(data.decode("utf-8-sig"), str(file))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: not valid UTF-8") from None


def parse_hostfile(text: str, name: str) -> list[Host]:
    """The hosts in the text of a host file; messages call the file `name`.

    Raises `UserError`, which names file and line.
    """
    if text.lstrip().startswith("{"):
        return _unique((where, host, False) for where, host in _rank_table(text, name))
    found = _unique(_lines(text, name))
    if not found:
        raise UserError(f"{name}: no hosts; {_FORMS}, one per line")
    return found


def assign(hosts: list[Host], num_ranks: int) -> list[Host]:
    """The first hosts with exactly `num_ranks` slots: horovodrun would start a rank in every slot.

    A host keeps all of its GPUs: how many a rank needs is up to its stages. Raises `UserError` if there are too few
    slots.
    """
    total = sum(host.slots for host in hosts)
    if num_ranks > total:
        raise UserError(f"-np {num_ranks}: the hosts have {total} slot{'s' * (total != 1)}")
    result, left = [], num_ranks
    for host in hosts:
        if left:
            result.append(host._replace(slots=min(host.slots, left)))
            left -= result[-1].slots
    return result


def _lines(text: str, name: str) -> Iterator[tuple[str, Host, bool]]:
    """Place and host, and whether it may be listed again: as a name alone, once per slot.

    PBS, SGE and LSF list hosts so; Open MPI counts them in the same way.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        where = f"{name}, line {number}"
        for host in _hosts(words, where) if words else ():
            yield where, host, len(words) == 1 and not set(words[0]) & set("[:")


def _hosts(words: list[str], where: str) -> list[Host]:
    """The hosts of one line or item: a name or a range, with slots after a colon or as words."""
    first, *rest = words
    bracketed = re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](.*)", first)
    if bracketed:
        address, tail = bracketed.groups()
        try:
            names = [str(IPv6Address(address))]
        except ValueError:
            raise UserError(f"{where}: {_quoted(address)} is not an IPv6 address") from None
    else:
        pattern, colon, count = first.partition(":")
        if ":" in count and "[" not in first:
            raise UserError(f"{where}: {_quoted(first)}: more than one colon; put an IPv6 address in brackets")
        names, tail = _expand(pattern, where), colon + count
    counts, gpus = {}, None
    if tail:
        if not tail.startswith(":"):
            raise UserError(f"{where}: {_quoted(first)}: {_FORMS}")
        counts["slots"] = _slots(tail[1:], where)
    for word in rest:
        if word.startswith("gpus="):
            if gpus is not None:
                raise UserError(f"{where}: gpus is given twice")
            gpus = _gpus(word.removeprefix("gpus="), where)
            continue
        match = _SLOT_WORD.fullmatch(word)
        if not match:
            more = "max_slots=4 or gpus=0,1 after slots=2"
            raise UserError(f"{where}: {_quoted(word)} after the host; {_FORMS}, and {more}")
        key = match[1].replace("-", "_")
        if key in counts:
            raise UserError(f"{where}: {key} is given twice")
        counts[key] = _slots(match[2], where)
    slots = counts.get("slots", 1)
    if counts.get("max_slots", slots) < slots:
        raise UserError(f"{where}: max_slots={counts['max_slots']} is below slots={slots}")
    if gpus is not None and len(gpus) < slots:
        raise UserError(f"{where}: gpus={_listed(gpus)} is fewer than slots={slots}; every slot needs a GPU of its own")
    return [Host(host, slots, gpus or ()) for host in names]


def _expand(pattern: str, where: str) -> list[str]:
    """Expand node[01-03,07] to node01, node02, node03, node07; several ranges to all combinations."""
    texts = re.split(r"\[([^\[\]]*)\]", pattern)  # names and ranges, alternating
    choices = [[text] if at % 2 == 0 else _numbers(text, where) for at, text in enumerate(texts)]
    total = math.prod(map(len, choices))
    if total > MAX_HOSTS:
        raise UserError(f"{where}: {_quoted(pattern)} is {total} hosts; at most {MAX_HOSTS} are allowed")
    return [_name("".join(parts), where) for parts in itertools.product(*choices)]


def _numbers(text: str, where: str) -> list[str]:
    """The numbers of a range such as 01-04,07, with leading zeros as written."""
    result: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise UserError(f"{where}: [{_quoted(text)[1:-1]}]: not a range of numbers such as [01-08] or [1-4,7]")
        if len(result) + int(last) - int(first) >= MAX_HOSTS:
            raise UserError(f"{where}: [{_quoted(text)[1:-1]}]: more than {MAX_HOSTS} hosts")
        width = len(first) if first.startswith("0") else 0
        result += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return result


def _name(text: str, where: str) -> str:
    if not _NAME.fullmatch(text):
        raise UserError(f"{where}: {_quoted(text)} is not a host name (letters, digits, '.', '-' and '_'); {_FORMS}")
    return text


def _slots(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= MAX_SLOTS:
        raise UserError(f"{where}: {_quoted(text)} slots; a host has 1 to {MAX_SLOTS}")
    return int(text)


def _gpus(text: str, where: str) -> tuple[int, ...]:
    """The numbers of gpus=0,1."""
    texts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,4}", number) and int(number) < MAX_GPUS for number in texts):
        allowed = f"numbers from 0 to {MAX_GPUS - 1} without spaces, as in gpus=0,1"
        raise UserError(f"{where}: gpus={_quoted(text)}: must be {allowed}")
    gpus = tuple(map(int, texts))
    for at, number in enumerate(gpus):
        if number in gpus[:at]:
            raise UserError(f"{where}: gpus={_listed(gpus)}: names GPU {number} twice")
    return gpus


def _listed(gpus: tuple[int, ...]) -> str:
    return _quoted(",".join(map(str, gpus)))[1:-1]


def check_no_ipv6(names: Iterable[str]) -> None:
    """Raise `UserError` for the first name of a host that is an IPv6 address."""
    for name in names:
        if ":" in name:
            raise UserError(f"[{name}]: horovodrun knows no IPv6 addresses; use a host name or an IPv4 address")


def _unique(found: Iterable[tuple[str, Host, bool]]) -> list[Host]:
    """The hosts; the slots of one that is listed again are added up where each time it may be (the third value).

    Raises `UserError` if another is listed twice, or if there are too many hosts or slots.
    """
    places: dict[str, tuple[str, bool]] = {}
    result: dict[str, Host] = {}
    for where, host, again in found:
        name = host.name.lower()
        if name in places:
            first, too = places[name]
            if not (again and too):
                raise UserError(f"{where}: host {host.name} is listed already: {first}")
            host = result[name]._replace(slots=_slots(str(result[name].slots + host.slots), where))
        else:
            places[name] = where, again
        result[name] = host
        if len(result) > MAX_HOSTS:
            raise UserError(f"{where}: more than {MAX_HOSTS} hosts")
    return list(result.values())


def _quoted(text: str) -> str:
    """Any text on one line, shortened and in quotes."""
    return ascii(text if len(text) <= 40 else text[:37] + "...")


def _rank_table(text: str, name: str) -> Iterator[tuple[str, Host]]:
    """The servers of a MindSpore rank table, and the place of each in the table."""
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # thousands of digits, or brackets nested without end
        raise UserError(f"{name}: not a rank table") from None
    if table.get("version") != "1.0":
        raise UserError(f'{name}: must hold "version": "1.0", as a MindSpore rank table does')
    servers = table.get("server_list")
    if not isinstance(servers, list) or not servers:
        raise UserError(f"{name}: server_list must be a list of servers")
    if str(table.get("server_count", len(servers))) != str(len(servers)):
        raise UserError(f"{name}: server_list has {len(servers)} servers, which differs from server_count")
    for number, server in enumerate(servers):
        where = f"{name}, server_list[{number}]"
        host = server.get("server_id") if isinstance(server, dict) else None
        if not isinstance(host, str):
            raise UserError(f"{where}: must hold server_id, a host's name or address")
        devices = server.get("device")
        if not isinstance(devices, list) or not devices:
            raise UserError(f"{where}: device must be a list with one entry per rank")
        yield where, Host(_name(host, where), _slots(str(len(devices)), where))

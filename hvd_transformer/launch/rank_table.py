"""MindSpore's rank table (version 1.0): JSON with a list of servers and the devices of each."""

import json
from typing import Any

from hvd_transformer.errors import UserError


def read_rank_table(text: str, name: str) -> list[tuple[str, str, int]]:
    """(place in the table, server_id, number of devices) of each server.

    Raises `UserError` that names the line, or the entry, that is wrong; `name` is what it calls the file.
    """
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}, line {error.lineno}: no valid JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets without an end
        raise UserError(f"{name}: no rank table") from None
    if table.get("version") != "1.0":
        raise UserError(f'{name}: must hold "version": "1.0", as a MindSpore rank table does')
    servers = table.get("server_list")
    if not isinstance(servers, list) or not servers:
        raise UserError(f"{name}: server_list must be a list of servers")
    if str(table.get("server_count", len(servers))) != str(len(servers)):
        raise UserError(f"{name}: server_list has {len(servers)} servers, which is not its server_count")
    return [_server(server, f"{name}, server_list[{number}]") for number, server in enumerate(servers)]


def _server(server: Any, where: str) -> tuple[str, str, int]:
    host = server.get("server_id") if isinstance(server, dict) else None
    if not isinstance(host, str):
        raise UserError(f"{where}: must hold server_id, a host's name or address")
    devices = server.get("device")
    if not isinstance(devices, list) or not devices:
        raise UserError(f"{where}: device must be a list with one entry a rank")
    return where, host, len(devices)

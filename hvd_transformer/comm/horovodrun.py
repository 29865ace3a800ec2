"""Horovod's part in a launch, without an ssh of its own: `python -m hvd_transformer.comm.horovodrun …`.

The arguments are those of horovodrun, with the network interfaces for jobs on several hosts. The original opens one ssh
per rank, and more to examine the hosts, puts the environment and a secret key on their command lines, and imports torch
to find out what Horovod was built with; its rendezvous listens on all interfaces. Here

- over MPI this process becomes Horovod's mpirun, which reaches the hosts by itself;
- over gloo it allocates the ranks to the slots, serves their rendezvous on one interface until standard input ends, and
  prints a line of JSON, from which the launcher's node agents start the ranks:
  `{"environment": variables of all ranks, "ranks": [variables of each, in order]}`.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from socketserver import TCPServer
from threading import Thread

from horovod.runner.common.util import config_parser, hosts
from horovod.runner.common.util.settings import Settings
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http import http_server
from horovod.runner.launch import parse_args
from horovod.runner.mpi_run import mpi_run
from horovod.runner.util import network

_WAITING = 4096  # connections that wait to be accepted: ranks connect all at once; the kernel's own limit may be lower


def main() -> None:
    args = parse_args()
    environment = dict(os.environ)
    config_parser.set_env_from_args(environment, args)
    interfaces = interfaces_of(sys.argv) or sorted(network.get_local_intfs())
    if args.use_mpi:
        # Horovod chooses the interfaces of the ranks only; this is for mpirun itself and its daemons.
        if "OMPI_MCA_oob_tcp_if_exclude" not in environment:
            environment.setdefault("OMPI_MCA_oob_tcp_if_include", ",".join(interfaces))
        settings = Settings(
            hosts=args.hosts,
            num_proc=args.num_proc,
            ssh_port=args.ssh_port,
            ssh_identity_file=args.ssh_identity_file,
        )
        mpi_run(settings, interfaces, environment, args.command)
    else:
        _serve_gloo(args, interfaces, environment)


def interfaces_of(words: Sequence[str]) -> list[str]:
    """Interfaces of the option `--network-interfaces`, in the order given; the parser makes a set of them."""
    for word, following in pairwise(words):
        if word == "--network-interfaces":
            return [name.strip() for name in following.split(",")]
    return []


class _Rendezvous(http_server.RendezvousHTTPServer):  # type: ignore[misc]
    """Horovod's, on one address; its own `RendezvousServer` always listens on all of them."""

    request_queue_size = _WAITING

    def server_bind(self) -> None:
        """Without `HTTPServer`'s question to the name server, whose answer nobody uses."""
        TCPServer.server_bind(self)


def _serve_gloo(args: Namespace, interfaces: list[str], environment: dict[str, str]) -> None:
    slots = hosts.get_host_assignments(hosts.parse_hosts(args.hosts), args.num_proc)
    address = network.get_driver_ip(interfaces)
    rendezvous = _Rendezvous((address, 0), http_server.RendezvousHandler, False)
    rendezvous.init(slots)
    Thread(target=rendezvous.serve_forever, daemon=True).start()
    environment |= create_run_env_vars(address, interfaces, str(rendezvous.server_address[1]))
    ranks = [create_slot_env_vars(slot) for slot in slots]
    print(json.dumps({"environment": environment, "ranks": ranks}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

"""Data parallel training over slow links: ours with each compression, and DistributedDataParallel with its hooks.

    python -m benchmarks.slow_link --mbit 100 --mbit 10

Two hosts on this machine (`namespace_hosts`, needs root), one rank of one thread on each, gloo for all; a token bucket
limits what each host sends. The model is shakespeare-char's: 3.3 MB of gradients in float32. Compressed gradients are
not the same mathematics: what each contestant does to the loss is shown beside its speed, from the file that
`compressed_loss` has written. Ours counts only if its loss is at most 0.5 % above the uncompressed one. Its ratio is
shown twice, to the best of all peers and to the best of those whose loss is not known to be further above.
"""

import math
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import get_args

import click

from benchmarks.command_line import measured, write_figures
from benchmarks.compressed_loss import BOUND, changes, read_losses
from benchmarks.group import REPOSITORY, Contestant
from benchmarks.launching import worker
from benchmarks.namespace_hosts import PATH, NamespaceHosts, missing
from benchmarks.paired import Options, Result, Target, as_json, table
from benchmarks.settings import ENVIRONMENT, Peer
from benchmarks.workload import SMALL
from hvd_transformer.config.schema import CommunicationConfig

# By Mbit/s: the steps of a block, a second or more of the slowest contestant, and the ratio that is wanted.
STEPS = {1000: 12, 100: 4, 10: 2}
WANTED = {1000: 1.05, 100: 1.15, 10: 1.5}
WARMUP = 1
PEERS = (
    Peer(plain=True, bucket_mb=1),
    Peer(plain=True),
    Peer(plain=True, hook="fp16"),
    *(Peer(plain=True, hook="powersgd", rank=rank) for rank in (1, 4, 16, 32)),
)
COMPRESSIONS = get_args(CommunicationConfig.model_fields["compression"].annotation)
LOCAL_STEPS = 8
LOSSES = REPOSITORY / "benchmarks" / "results" / "compressed_loss.json"
LEAST_SETTLE = 9  # steps after which auto has chosen
OURS, LOCAL = "ours, {}", f"ours, {LOCAL_STEPS} local steps"
_PORTS = count(29600)
_SSH = """\
#!/bin/sh
# ssh [OPTION …] HOST [OPTION …] COMMAND, of horovodrun: so its rank on another host is a child of the launcher too.
host=
while :; do
    case "$1" in
        -[oip]) shift 2 ;;
        -*) shift ;;
        *) [ -z "$host" ] || break; host=$1; shift ;;
    esac
done
exec nsenter -t "$(cat "$(dirname "$0")/$host")" --net --uts --mount -- sh -c "$*"
"""


class LinkedHosts(NamespaceHosts):
    """The two hosts, with a stand-in for ssh, and how a contestant is started on them."""

    def __init__(self) -> None:
        super().__init__()
        for host in self.names:
            (self.folder / host).write_text(str(self.keeper(host)))
        (self.folder / "ssh").write_text(_SSH)
        (self.folder / "ssh").chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.folder}:{ENVIRONMENT['PATH']}:{PATH}"
        # In another mount namespace a process is in the folder /, where `python -m benchmarks…` finds nothing.
        return {**ENVIRONMENT, "PATH": path, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "eth0"}

    def horovod(self, name: str, *settings: str) -> Contestant:
        """Ours over gloo."""
        launcher = ["horovodrun", "-np", "2", "-H", "h1:1,h2:1", "--gloo", "--network-interfaces", "eth0"]
        command = [*self.enter("h1"), *launcher, *worker("trainer", *SMALL, *settings)]
        return Contestant(name, [command], 2, self.environment)

    def torchrun(self, name: str, peer: Peer) -> Contestant:
        """DistributedDataParallel over gloo."""
        launcher = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", self.address("h1")]
        launcher += ["--master-port", str(next(_PORTS))]
        words = worker("ddp", *SMALL, peer=peer)[1:]  # torchrun puts Python before the words itself
        commands = [
            [*self.enter(host), *launcher, "--node-rank", str(rank), *words] for rank, host in enumerate(self.names)
        ]
        return Contestant(name, commands, 2, self.environment)


def compressed(hosts: LinkedHosts, options: Options) -> list[Contestant]:
    """Ours, each compression once. They know how many steps there will be, as some begin after a part of them."""
    total = 10 + options.settle + options.rounds * (options.warmup + options.steps)
    return [
        hosts.horovod(OURS.format(name), f"communication.compression={name}", f"training.max_steps={total + 1}")
        for name in COMPRESSIONS
    ]


def local(hosts: LinkedHosts) -> list[Contestant]:
    """Ours with local steps, if the package has them; a block is one period, whichever step it begins with."""
    if "local_steps" not in CommunicationConfig.model_fields:
        return []
    contestant = hosts.horovod(LOCAL, f"communication.local_steps={LOCAL_STEPS}")
    return [replace(contestant, trains=None, steps=LOCAL_STEPS)]


def loss_changes(result: Result, losses: Path) -> dict[str, float]:
    """By contestant: per cent of its loss above the uncompressed one, of those for which the file has it."""
    above = changes(read_losses(losses))
    methods = {f"DDP, {peer}": peer.method for peer in PEERS}
    # What auto chose is in the note.
    methods |= {OURS.format(name): OURS.format(result.notes[OURS.format(name)]) for name in COMPRESSIONS}
    methods[LOCAL] = LOCAL
    return {name: above[method] for name, method in methods.items() if method in above}


def measure_link(hosts: LinkedHosts, mbit: int, rounds: int, losses: Path) -> dict[str, object]:
    """The table of one speed, printed, and its figures."""
    hosts.shape(mbit)
    steps = STEPS[mbit]
    # Longer than the first tenth, which PowerSGD leaves uncompressed.
    options = Options(rounds, steps, WARMUP, settle=max(LEAST_SETTLE, 3 + rounds * (WARMUP + steps) // 8))
    ours, of_local = compressed(hosts, options), local(hosts)
    peers = [hosts.torchrun(f"DDP, {peer}", peer) for peer in PEERS]
    # Those without compression must have the same losses.
    plain = {OURS.format("none"), *(f"DDP, {peer}" for peer in PEERS if peer.hook == "none")}
    marked = [one if one.name in plain else replace(one, trains=None) for one in [*ours, *peers]]
    result = measured([*marked, *of_local], options)
    above = loss_changes(result, losses)
    names = [one.name for one in peers]
    # A loss that was not measured speaks for a peer and against ours.
    fair = [name for name in names if above.get(name, 0.0) <= BOUND]
    best = [one.name for one in ours if one.name in plain or above.get(one.name, math.inf) <= BOUND]
    targets = [Target(best, base, WANTED[mbit]) for base in (names, fair)]
    targets += [Target([one.name], base, None) for one in [*ours, *of_local] for base in (names, fair)]
    texts = {name: f"{above[name]:+.2f} %" if name in above else "not measured" for name in result.rates}
    chosen = f"auto chose {result.notes[OURS.format('auto')]}"
    click.echo(f"{mbit} Mbit/s, {chosen}\n{table(result, targets, ('loss above uncompressed', texts))}\n")
    return {**as_json(result, targets), "loss_above": above, "auto": result.notes[OURS.format("auto")]}


@click.command()
@click.option("--mbit", multiple=True, type=click.Choice([str(speed) for speed in STEPS]), help="Default: all.")
@click.option("--rounds", default=21, show_default=True, type=click.IntRange(1), help="Blocks of each.")
@click.option(
    "--losses", default=LOSSES, type=click.Path(path_type=Path), help="What compressed_loss wrote.", show_default=True
)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(mbit: tuple[str, ...], rounds: int, losses: Path, file: Path | None) -> None:
    """Measure training of two hosts over slow links against DistributedDataParallel with its hooks."""
    if (why := missing(["tc"])) is not None:
        click.echo(f"benchmark: {why}", err=True)
        sys.exit(1)
    with LinkedHosts() as hosts:
        figures = {speed: measure_link(hosts, int(speed), rounds, losses) for speed in mbit or map(str, STEPS)}
    write_figures(file, figures)


if __name__ == "__main__":
    main()

"""How many hosts and ranks a job may have: open files, and the size up to which gloo starts."""

import resource
import sys

from hvd_transformer.errors import UserError

# Over gloo every rank fetches the addresses of all others from horovodrun, twice for each of its two worlds: 4 P²
# requests, of which one core answers 1,400 per second (measured). 256 ranks take three minutes, and Horovod gives up
# after five (`comm/horovod_env.py`).
GLOO_RANKS = 256
_MOST_FILES = 1 << 20  # programs that close every number that they might have open get slow above
_FILES_PER_HOST = 5  # of the launcher: three pipes to ssh, and what waits for its end
_FILES_PER_RANK = 4  # of a gloo rank, for each rank of the job: measured with all ranks on one host, which is the most
_FILES_BESIDES = 256


def raise_open_files() -> int:
    """Let this process and all that it starts open as many files as the host allows; return how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def require_files_for_hosts(num_hosts: int) -> None:
    """Raise `UserError` if this process may not open enough files to reach so many hosts."""
    most = (raise_open_files() - _FILES_BESIDES) // _FILES_PER_HOST
    if num_hosts > most:
        raise UserError(f"{num_hosts} hosts: the limit of open files here allows at most {most}; raise `ulimit -Hn`")


def too_few_files_for_gloo(num_ranks: int, open_files: int) -> str | None:
    """Why a rank on a host with this limit cannot connect to all others over gloo; None: it can."""
    most = (open_files - _FILES_BESIDES) // _FILES_PER_RANK
    if open_files < 0 or num_ranks <= most:  # -1: unlimited
        return None
    return (
        f"its limit of {open_files} open files allows gloo at most {most} ranks; raise it there for ssh logins "
        "(LimitNOFILE of sshd, /etc/security/limits.conf), or use --mpi"
    )


def warn_of_gloo(num_ranks: int) -> None:
    """Say that so many ranks may not find each other over gloo, which the user asked for."""
    if num_ranks > GLOO_RANKS:
        print(
            f"hvd-transformer: --gloo: {num_ranks} ranks may not find each other in time; up to {GLOO_RANKS} do, and "
            "--mpi has no such limit",
            file=sys.stderr,
            flush=True,
        )

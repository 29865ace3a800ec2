"""What every contestant of a paired benchmark gets, ours and the peers alike. A help that one has, all have.

threads      one per rank (two in all where two cores are given to one process), and no more for the launcher
memory       `training.process.tune_memory`, called by `contestants.main` before anything is allocated
garbage      `training.process.only_new_garbage`, around all blocks
interface    the loopback for whoever uses sockets
warm-up      unmeasured steps before each block, the same number for all; the others stand still meanwhile
loss         read once per block, from the last step
optimizer    AdamW, fused; gradients clipped by their norm
buckets      ours: the package's default, whatever the model. DistributedDataParallel's: the best of PEER_VARIANTS,
             chosen for each model in the same run
"""

import os
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

RANKS = 2
INTERFACE = "lo"
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@dataclass(frozen=True)
class Peer:
    """What whoever writes a torch loop may choose.

    `plain`: the model of torch's own modules with whole logits, in place of the package's modules, whose loss is
    computed in chunks. `compiled`: by torch.compile, the model with its loss; the package's modules call back into
    Python, so plain ones only. `keep_gradients`: they are set to zero, so that they stay views of the buckets, instead
    of freed and copied there. `hook` compresses: "fp16", or "powersgd" of matrices of `rank`.
    """

    plain: bool = False
    compiled: bool = False
    bucket_mb: int = 25
    keep_gradients: bool = False
    hook: str = "none"
    rank: int = 1

    def __str__(self) -> str:
        words = [f"{self.bucket_mb} MB", "plain modules" if self.plain else "our modules"]
        words += ["torch.compile"] if self.compiled else []
        words += ["gradients kept"] if self.keep_gradients else []
        words += {"none": [], "fp16": ["fp16 hook"], "powersgd": [f"PowerSGD {self.rank}"]}[self.hook]
        return ", ".join(words)

    @property
    def method(self) -> str:
        """What it sends, without what only its speed depends on."""
        return "DDP" + {"none": "", "fp16": ", fp16 hook", "powersgd": f", PowerSGD {self.rank}"}[self.hook]

    def options(self) -> dict[str, object]:
        """For the command line."""
        return asdict(self)


# With `gradient_as_bucket_view` and `static_graph`, which never hurt here. torch's default is 25 MB.
PEER_VARIANTS = (
    *(Peer(plain=plain, bucket_mb=size) for plain, size in product((False, True), (1, 8, 25, 100))),
    *(Peer(plain=plain, keep_gradients=True) for plain in (False, True)),
    *(Peer(plain=True, compiled=True, bucket_mb=size) for size in (1, 25)),
)

"""`datasets` with `tokenizers` in an environment of its own, on the same documents and cores."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from click import ClickException

from benchmarks.documents.corpus import END
from benchmarks.documents.watched import watch
from benchmarks.settings import ENVIRONMENT

# Processes, and threads of `tokenizers` in each.
PEERS = {"datasets, 2 processes of 1 thread": (2, 1), "datasets, 1 process of 2 threads": (1, 2)}
_SCRIPT = Path(__file__).with_name("peer_script.py")


def run_peer(
    python: Path, processes: int, threads: int, tokenizer: Path, shards: list[Path], expected: dict[str, Any]
) -> dict[str, float]:
    """Its figures; `arrow_tokens_per_second` is without writing the file of tokens. Raises `ClickException` where its
    tokens are not the expected ones: an entry of our index."""
    with tempfile.TemporaryDirectory(prefix="peer-", dir=shards[0].parent.parent) as folder:
        options = {
            "tokenizer": str(tokenizer / "tokenizer.json"), "end": END, "files": [str(shard) for shard in shards],
            "processes": processes, "cache": f"{folder}/cache", "output": f"{folder}/tokens.bin",
        }  # fmt: skip
        environment = {
            **os.environ, **ENVIRONMENT, "RAYON_NUM_THREADS": str(threads), "HF_HOME": folder, "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": str(threads > 1).lower(), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }  # fmt: skip
        environment.pop("PYTHONPATH", None)  # that of another Python
        run = watch([str(python), str(_SCRIPT), json.dumps(options)], environment)
    found = json.loads(run.output.splitlines()[-1])
    tokens, digest = found.pop("tokens"), found.pop("sha256")
    if (tokens, digest) != (expected["tokens"], expected["sha256"]):
        raise ClickException(f"the peer's {tokens:,} tokens are not our {expected['tokens']:,}")
    return {**run.figures(tokens), "arrow_tokens_per_second": tokens / (run.seconds - found["write"]), **found}

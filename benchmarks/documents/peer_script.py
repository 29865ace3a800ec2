"""What one writes with `datasets` and `tokenizers`: the same documents by the same tokenizer.json, as nanoGPT's script
does it. Runs alone, in an environment that has these two packages.

    python peer_script.py '{"tokenizer": …, "end": …, "files": […], "processes": 2, "cache": …, "output": …}'

The numbers of each document are in an Arrow file, as 16 bits each; then they are written as one file. Prints JSON.
"""

import hashlib
import json
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from datasets import Features, Sequence, Value, load_dataset
from tokenizers import Tokenizer


def encode(tokenizer: Tokenizer, end: int, batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
    """The numbers of a batch of documents, each with the end."""
    found = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"ids": [np.array([*encoding.ids, end], np.uint16) for encoding in found]}


def main(options: dict) -> None:
    """Times are of each stage, without imports."""
    times = [time.monotonic()]
    tokenizer = Tokenizer.from_file(options["tokenizer"])
    processes = options["processes"] if options["processes"] > 1 else None
    texts = load_dataset(
        "json", data_files=options["files"], split="train", cache_dir=options["cache"], num_proc=processes
    )
    times.append(time.monotonic())
    numbers = texts.map(
        partial(encode, tokenizer, tokenizer.token_to_id(options["end"])),
        batched=True,
        remove_columns=texts.column_names,
        features=Features({"ids": Sequence(Value("uint16"))}),
        num_proc=processes,
    )
    times.append(time.monotonic())
    digest, count = hashlib.sha256(), 0
    with Path(options["output"]).open("wb") as file:
        for batch in numbers.with_format("arrow").iter(1000):
            for chunk in batch["ids"].chunks:
                data = chunk.flatten().to_numpy().tobytes()
                digest.update(data)
                file.write(data)
                count += len(data) // 2
    times.append(time.monotonic())
    loaded, mapped, written = (after - before for before, after in pairwise(times))
    print(json.dumps({"load": loaded, "map": mapped, "write": written, "tokens": count, "sha256": digest.hexdigest()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

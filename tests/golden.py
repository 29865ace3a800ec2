"""Golden runs: tiny jobs of every kind whose results a change of the code must not move by a single bit.

    python tests/golden.py make FOLDER    # with the code before the change
    python tests/golden.py check FOLDER   # with the code after it: trains again, and resumes the old checkpoints

The results belong to one machine: they differ with the CPU's kind and torch's version. GOLDEN_CHECKOUT names the
checkout whose code runs (default: this one), GOLDEN_ONLY the jobs (default: all, separated by commas).
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CHECKOUT = Path(os.environ.get("GOLDEN_CHECKOUT", TESTS.parent))
BIN = Path(sys.executable).parent
WORDS = ["ein", "zwei", "drei", "rot", "blau", "Haus", "Hund", "geht", "nicht", "sehr"]
STEPS, MORE = 6, 10
# Lines of metrics.jsonl and summary.json hold times, who was slow, what steps cost, and where they ran.
TIMES = ("second", "slow", "wait", "straggler", "work", "mfu", "memory", "host_cpu", "env")

COMMON = [
    "seed=3", "data.workers=1", "data.sequence_length=12", "training.device=cpu", "training.log_every=1",
    "training.eval_every=3", "training.batch_size=4", "training.epochs=50", "checkpoint.every_steps=3",
    "communication.bucket_mb=0.005", "optimizer.lr=0.003",
]  # fmt: skip
# Not of a model from a Hugging Face folder.
SIZE = [
    "model.num_layers=4", "model.d_model=16", "model.num_heads=2", "model.d_feedforward=24",
    "parallel.partition=uniform",
]  # fmt: skip
TEXT = ["data.source={inputs}/text", "data.tokenizer=char"]
PAIRS = ["task=translation", "data.source={inputs}/pairs", "translation.beam=2"]
REVIEWS = ["task=classification", "data.source={inputs}/reviews"]
PIPELINE = ["parallel.pipeline=2", "parallel.micro_batches=3", "training.accumulation=2"]
# Ranks, settings.
JOBS = {
    "one": (1, TEXT),
    "two": (2, [*TEXT, "training.accumulation=2", "communication.embedding_rows=always"]),
    "two_dense": (2, [*TEXT, "communication.embedding_rows=never", "communication.compression=fp16"]),
    "gpipe": (1, [*TEXT, *PIPELINE, "parallel.schedule=gpipe", "parallel.recompute=except_last"]),
    "1f1b": (2, [*TEXT, *PIPELINE, "parallel.recompute=always"]),
    "zero_bubble": (2, [*TEXT, *PIPELINE, "parallel.schedule=zero_bubble"]),
    "tensor": (2, [*TEXT, "parallel.tensor=2", "parallel.vocab_parallel=true", "parallel.pipeline=2"]),
    "zero_state": (2, [*TEXT, "parallel.optimizer_shard=state", "parallel.micro_batches=2"]),
    "zero_gradients": (2, [*TEXT, *PIPELINE, "parallel.optimizer_shard=gradients"]),
    "columns": (2, [*TEXT, "data.batching=columns", "data.tokenizer=basic_english"]),
    "translation": (2, [*PAIRS, "data.tokenizer=bpe", "data.vocab_size=280", "model.share_embeddings=true"]),
    "translation_tensor": (2, [*PAIRS, "data.tokenizer=basic_english", "parallel.tensor=2", "data.batch_tokens=60"]),
    "classification": (2, [*REVIEWS, "data.tokenizer=basic_english", "data.class_weights=balanced"]),
    "bf16": (1, [*TEXT, "training.precision=bf16", "model.position=learned", "model.tie_embeddings=false"]),
    "fp16": (2, [*TEXT, "training.precision=fp16", "model.norm=post", "model.activation=relu"]),
    "dropout": (2, [*TEXT, *PIPELINE, "model.dropout=0.2", "model.position=rotary", "training.label_smoothing=0.1"]),
    "bpe": (1, ["data.source={inputs}/text", "data.tokenizer=bpe", "data.vocab_size=300", "data.workers=2"]),
    "sgd": (
        2,
        [*TEXT, "optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.schedule=noam", "optimizer.warmup_steps=4"],
    ),
    "bert": (2, ["task=classification", "model.pretrained={inputs}/bert", "data.source={inputs}/reviews"]),
    "gpt": (1, ["model.pretrained={inputs}/gpt", "data.source={inputs}/english"]),
}  # fmt: skip


def write_inputs(folder: Path) -> None:
    """A text, pairs, reviews, and two tiny Hugging Face folders."""
    sys.path.insert(0, str(TESTS))
    import huggingface

    rng = random.Random(5)
    for name in ("text", "pairs", "reviews", "english"):
        (folder / name).mkdir(parents=True)
    for split, number in {"train": 120, "valid": 20, "test": 10}.items():
        rows = [rng.choices(WORDS, k=rng.randint(2, 9)) for _ in range(number)]
        english = [rng.choices(huggingface.WORDS, k=rng.randint(2, 9)) for _ in range(number)]
        texts = {
            f"text/{split}.txt": [" ".join(row) for row in rows],
            f"pairs/{split}.de": [" ".join(row) for row in rows],
            f"pairs/{split}.en": [" ".join(reversed(row)).upper() for row in rows],
            f"reviews/{split}.csv": [
                "label,text", *(f"{'good' if 'good' in row else 'bad'},{' '.join(row)}" for row in english)
            ],
            f"english/{split}.txt": [" ".join(row) for row in english * 3],
        }  # fmt: skip
        for name, lines in texts.items():
            (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    huggingface.write_bert(folder / "bert")
    huggingface.write_gpt(folder / "gpt")


def train(folder: Path, name: str, output: Path, cache: Path, steps: int) -> None:
    """Trains, or resumes, the job until `steps`."""
    num_ranks, settings = JOBS[name]
    launcher = ["horovodrun", "-np", str(num_ranks), "-H", f"localhost:{num_ranks}"] if num_ranks > 1 else []
    words = [
        *launcher, str(BIN / "python"), "-m", "hvd_transformer.cli.train", *COMMON,
        *([] if any("model.pretrained" in word for word in settings) else SIZE),
        *(word.format(inputs=folder / "inputs") for word in settings),
        f"training.max_steps={steps}", f"output_dir={output}", f"data.cache_dir={cache}",
    ]  # fmt: skip
    path = f"{BIN}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=folder)
    if result.returncode != 0:
        sys.exit(f"{name}: exit code {result.returncode}\n{result.stdout}{result.stderr}")


def digests(run: Path, cache: Path) -> dict[str, str]:
    """What must not change of a run: its tensors, its metrics without their times, its prepared data."""
    found = {}
    for file in sorted((run / "checkpoints").glob("step-*/**/*.safetensors")):
        found[str(file.relative_to(run))] = hashlib.sha256(file.read_bytes()).hexdigest()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for number, line in enumerate([*lines, json.loads((run / "summary.json").read_text(encoding="utf-8"))]):
        kept = {key: value for key, value in line.items() if not any(time in key for time in TIMES)}
        found[f"line {number}"] = json.dumps(kept)
    for file in sorted(cache.rglob("*")):
        if file.is_file() and not file.name.endswith(".lock"):
            found[f"cache/{file.relative_to(cache)}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def differences(name: str, wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    return [
        f"{name}: {key}: {wanted.get(key, 'missing')} before, {found.get(key, 'missing')} now"
        for key in sorted(wanted.keys() | found.keys())
        if wanted.get(key) != found.get(key)
    ]


def make(folder: Path, name: str) -> None:
    run, cache = folder / "before" / name, folder / "before-cache" / name
    train(folder, name, run, cache, STEPS)
    shutil.copytree(run, folder / "saved" / name, symlinks=True)
    wanted = {"trained": digests(run, cache)}
    train(folder, name, run, cache, MORE)
    wanted["resumed"] = digests(run, cache)
    (folder / f"{name}.json").write_text(json.dumps(wanted, indent=1), encoding="utf-8")


def check(folder: Path, name: str) -> list[str]:
    wanted = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    run, cache = folder / "after" / name, folder / "after-cache" / name
    for old in (run, cache):
        shutil.rmtree(old, ignore_errors=True)
    train(folder, name, run, cache, STEPS)
    found = differences(f"{name}, trained", wanted["trained"], digests(run, cache))
    shutil.rmtree(run)
    shutil.copytree(folder / "saved" / name, run, symlinks=True)
    train(folder, name, run, cache, MORE)
    return found + differences(f"{name}, resumed", wanted["resumed"], digests(run, cache))


def main() -> None:
    action, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    names = os.environ["GOLDEN_ONLY"].split(",") if "GOLDEN_ONLY" in os.environ else list(JOBS)
    if action == "make":
        if not (folder / "inputs").exists():
            write_inputs(folder / "inputs")
        for name in names:
            make(folder, name)
            print(f"{name}: made", flush=True)
        return
    failed = 0
    for name in names:
        found = check(folder, name)
        failed += bool(found)
        print(f"{name}: {'same' if not found else chr(10).join(found)}", flush=True)
    print(f"{failed} of {len(names)} jobs differ")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

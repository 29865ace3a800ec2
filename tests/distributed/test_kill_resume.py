"""A job that was killed, stopped or given another number of ranks goes on as if nothing had happened."""

import json
import os
import random
import re
import time
from collections import Counter
from dataclasses import replace

import plain
import pytest
from jobs import (
    TRAIN,
    lines,
    relative_difference,
    started,
    state,
    steps,
    summary,
    tiny,
    weights,
    write_corpus,
)

from hvd_transformer.checkpoint import manifest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

STEPS = 120
LAST_KILL = 45  # many steps before the end, which a slow test may not miss
OWN_SETTINGS = {"gloo": [], "mpirun": ["model.dropout=0.1", "optimizer.name=muon", "optimizer.ema=0.9"]}
# Which ranks die, and whether while a checkpoint is written.
KILLS = {
    "gloo": [("1", False), ("all", True)],
    "mpirun": [("0", True)],
    "gloo, all": [("0", True), ("1", False), ("0", True), ("all", True)],
    "mpirun, all": [("all", False), ("0", True)],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=3500)


@pytest.fixture(scope="module")
def unbroken(world, corpus, tmp_path_factory):
    """The finished run of two ranks, made once: unbroken("gloo"). Two ranks' sums are the same, however they talk."""
    made = {}

    def make(backend):
        if backend not in made:
            made[backend] = tmp_path_factory.mktemp(backend) / "run"
            _, *words = command(corpus, made[backend], backend)
            world(2).train(words)
        return made[backend]

    return make


def command(corpus, run, backend):
    return [
        TRAIN,
        *tiny(corpus),
        f"output_dir={run}",
        f"training.max_steps={STEPS}",
        "training.epochs=100",
        "training.eval_every=25",
        "checkpoint.every_steps=2",
        "communication.bucket_mb=0.01",
        *OWN_SETTINGS[backend],
    ]


def newest_step(run):
    """The last step in metrics.jsonl, 0 before the first."""
    try:
        numbers = re.findall(rb'^\{"step": (\d+).*\}$', (run / "metrics.jsonl").read_bytes(), re.MULTILINE)
    except FileNotFoundError:
        return 0
    return int(numbers[-1]) if numbers else 0


def wait_for(job, condition, seconds=90, interval=0.002):
    deadline = time.monotonic() + seconds
    while not condition():
        assert job.popen.poll() is None, f"ended too early:\n{job.text()}"
        assert time.monotonic() < deadline, f"waited {seconds} s:\n{job.text()}"
        time.sleep(interval)


def wait_for_step(job, run, step):
    wait_for(job, lambda: newest_step(run) >= step)


def end_and_check(job, run):
    """After the kill: the rest of the job ends by itself, and every checkpoint is whole; what was being written."""
    assert job.wait(20) != 0
    job.wait_gone(20)
    for path in (run / "checkpoints").glob("step-*"):
        manifest.verify(path)
    return [path.name for path in (run / "checkpoints").glob(".saving-*")]


TIMES = {
    "tokens_per_second", "milliseconds_per_step",
    "slowest_rank", "slowest_work_milliseconds", "others_work_milliseconds",
    "mfu", "peak_memory_bytes", "data_wait_milliseconds", "communication_wait_milliseconds", "host_cpu_share",
    "network_sent_bytes_per_second", "network_received_bytes_per_second",
}  # fmt: skip


def same_run(found, wanted):
    """Bit for bit the same weights, optimizer and losses; each logged step once."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (found / "checkpoints/latest" / name).read_bytes() == (wanted / "checkpoints/latest" / name).read_bytes()
    first, second = (
        [{key: value for key, value in line.items() if key not in TIMES} for line in lines(run)]
        for run in (found, wanted)
    )
    assert first == second
    assert Counter(line["step"] for line in first if "loss" in line) == Counter(range(1, STEPS + 1))
    keys = ("status", "steps", "epochs", "samples", "train_loss", "valid_loss", "test_loss", "best_step")
    assert [summary(found)[key] for key in keys] == [summary(wanted)[key] for key in keys]


@pytest.mark.parametrize(
    "kills", [*list(KILLS)[:2], *(pytest.param(kills, marks=pytest.mark.slow) for kills in list(KILLS)[2:])]
)
def test_killed_runs_end_like_an_unbroken_one(world, unbroken, corpus, tmp_path, kills):
    backend, run, rng = kills.partition(",")[0], tmp_path / "run", random.Random(f"kills {kills}")
    targets = sorted(rng.sample(range(5, LAST_KILL), len(KILLS[kills])))
    plan, during_saves = list(zip(targets, KILLS[kills], strict=True)), 0
    for number, (target, (who, in_save)) in enumerate(plan):
        before = newest_step(run)
        with started(2, command(corpus, run, backend), backend, tmp_path / f"output-{number}") as job:
            wait_for_step(job, run, target)
            victims = list(job.ranks().values()) if who == "all" else [job.ranks()[int(who)]]
            with_launcher = who == "all" and backend == "gloo"  # mpirun stays, to remove its shared memory
            if with_launcher:
                victims = job.processes()
            if in_save:
                wait_for(job, lambda: any((run / "checkpoints").glob(".saving-*")), interval=0.0003)
            else:
                time.sleep(rng.uniform(0, 0.05))
            for process in victims:
                process.kill()
            torn = end_and_check(job, run)
            # A launcher that is killed may not have passed on what it was told.
            assert before == 0 or with_launcher or "resuming from" in job.text()
        during_saves += bool(torn)
        if in_save and not torn and newest_step(run) < STEPS - 10:  # the checkpoint was whole before the kill: again
            plan.append((newest_step(run) + 2, (who, in_save)))
        print(f"{backend}: killed {who} at step {newest_step(run)} of {STEPS}, half-written: {torn or 'nothing'}")
    _, *words = command(corpus, run, backend)
    world(2).train(words)
    assert during_saves > 0
    assert not list((run / "checkpoints").glob(".*"))
    same_run(run, unbroken(backend))


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("Ctrl-C", marks=pytest.mark.slow)])
def test_stopped_runs_end_like_an_unbroken_one(world, unbroken, corpus, tmp_path, how):
    """SIGTERM to horovodrun, or Ctrl-C as a terminal sends it, to the launcher's whole group."""
    run = tmp_path / "run"
    with started(2, command(corpus, run, "gloo"), "gloo", tmp_path / "output-stopped") as job:
        wait_for_step(job, run, 20)
        if how == "SIGTERM":
            job.popen.terminate()
        else:
            job.interrupt()
        assert job.wait(20) != 0
        job.wait_gone(5)
        text = job.text()
    last = newest_step(run)
    assert 20 <= last < STEPS
    assert text.count(f"stopped after step {last} (") == 1
    assert "everything is saved: the same command resumes from here" in text
    assert not re.search(r"^\[\d\].*(Traceback|lost another)", text, re.MULTILINE)
    assert state(run)["position"]["step"] == last
    assert summary(run)["status"] == "stopped"
    program, *words = command(corpus, run, "gloo")
    done = world(2).command(program.name, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout
    same_run(run, unbroken("gloo"))


def test_a_finished_run_trains_nothing_more(unbroken, world, corpus):
    run = unbroken("gloo")
    kept = ["metrics.jsonl", *(f"checkpoints/latest/{name}.safetensors" for name in ("model", "optimizer"))]
    before, numbers = [(run / name).read_bytes() for name in kept], summary(run)
    _, *words = command(corpus, run, "gloo")
    world(2).train(words)
    assert [(run / name).read_bytes() for name in kept] == before
    assert summary(run) == numbers


@pytest.fixture
def without_progress(world, corpus, tmp_path):
    """Starts a run in which the first evaluation, after step 3, stays the best: nothing is learned at this rate."""
    run = tmp_path / "run"
    words = ["hvd-train", *tiny(corpus), f"output_dir={run}", "optimizer.name=sgd", "optimizer.lr=1e-30"]
    words += ["training.eval_every=3", "training.epochs=9"]

    def start(num_ranks, patience, *more):
        result = world(num_ranks).command(*words, f"training.patience={patience}", *more)
        assert result.returncode == 0, result.stdout + result.stderr
        kept = ["metrics.jsonl", *(f"checkpoints/latest/{name}" for name in ("model.safetensors", "state.json"))]
        return [(run / name).read_bytes() for name in kept], summary(run), result.stdout

    start.run = run
    return start


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_patience_ended_trains_nothing_more(without_progress, num_ranks):
    """More patience goes on."""
    *before, _ = without_progress(num_ranks, 2)
    run = without_progress.run
    assert (summary(run)["status"], summary(run)["steps"], summary(run)["best_step"]) == ("finished", 9, 3)
    *after, text = without_progress(num_ranks, 2)
    assert after == before
    assert "step 9: 2 evaluations in a row without improvement, training.patience=2: training ends" in text
    without_progress(num_ranks, 4)
    assert [step for (step,) in steps(run)] == list(range(1, 16))
    assert state(run)["position"]["not_better"] == 4


def test_another_metric_begins_with_no_best(without_progress):
    without_progress(1, 2)
    *_, text = without_progress(1, 2, "training.best_metric=perplexity")
    run = without_progress.run
    assert (summary(run)["best_metric"], summary(run)["best_step"], summary(run)["steps"]) == ("perplexity", 9, 15), (
        text
    )
    assert summary(run)["best_value"] == pytest.approx(summary(run)["valid_perplexity"])


def test_patience_ends_with_an_evaluation_that_a_stop_put_off(without_progress):
    without_progress(1, 2)
    run = without_progress.run
    folder = (run / "checkpoints/latest").resolve()
    stopped = state(run)
    stopped["position"] |= {"evaluated_step": 6, "not_better": 1}
    (folder / "state.json").write_text(json.dumps(stopped))
    (folder / manifest.NAME).unlink()
    manifest.write(folder)
    *before, _ = without_progress(1, 2)
    assert (summary(run)["steps"], state(run)["position"]["not_better"]) == (9, 2)
    *after, _ = without_progress(1, 2)
    assert after == before


def test_goes_on_where_no_update_was_made_yet(world, corpus, tmp_path):
    """In float16 the first steps may all overflow; then the optimizer has no state to save."""
    words = [*tiny(corpus), f"output_dir={tmp_path / 'run'}", "training.precision=fp16", "training.epochs=9"]
    for num_steps, updated in ((2, False), (40, True)):
        run = [*words, f"training.max_steps={num_steps}"]
        ((code, out, err),) = world(1).call("faulty:train", 0, 0, "overflow", run)
        assert code == 0, out + err
        assert (state(tmp_path / "run")["position"]["updates"] > 0) == updated


@pytest.mark.parametrize(
    "compression",
    ["fp16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16_fp32_sum", "int4", "powersgd")), "int8"],
)
def test_a_resumed_run_rounds_gradients_in_transit_as_before(world, corpus, tmp_path, compression):
    """Bit for bit, also where the ranks of a tensor group have buckets of different sizes: the vocabulary is odd."""
    words = [*tiny(corpus), "parallel.tensor=2", "parallel.vocab_parallel=true", "optimizer.schedule=constant"]
    words += [f"communication.compression={compression}", "communication.bucket_mb=0.001"]
    words += ["communication.powersgd_rank=1"] if compression == "powersgd" else []
    parts = [(name, num_steps) for name in ("whole", "resumed") for num_steps in (4, 9)][1:]
    world(4).train(*([*words, f"output_dir={tmp_path / name}", f"training.max_steps={end}"] for name, end in parts))
    whole, resumed = (state(tmp_path / name)["wire"] for name in ("whole", "resumed"))
    assert len(whole) == 2 and all(whole) and resumed == whole
    kept = [] if compression == "fp16_fp32_sum" else ["wire.safetensors"]
    for name in ("model.safetensors", "optimizer.safetensors", *kept):
        whole, resumed = (tmp_path / run / "checkpoints/latest" / name for run in ("whole", "resumed"))
        assert resumed.read_bytes() == whole.read_bytes()


def test_columns_cannot_be_cut_anew_in_mid_epoch(world, corpus, tmp_path):
    """Other columns are other samples: what remains of the old ones would be seen twice or never."""
    settings = [*tiny(corpus), f"output_dir={tmp_path / 'run'}", "data.batching=columns"]
    world(1).train([*settings, "training.batch_size=8", "training.max_steps=20"])
    for size in (4, 16):
        second = world(1).command("hvd-train", *settings, f"training.batch_size={size}")
        assert second.returncode == 2, second.stdout + second.stderr
        assert second.stderr.startswith(f"hvd-train: training.batch_size={size}: ")
        assert len(second.stderr.splitlines()) == 1


# The number of ranks of each part of a run, and the step after which each ends.
RESIZED = {"2to1": ((2, 5), (1, None)), "2to1to3to2": ((2, 3), (1, 8), (3, 11), (2, None))}
if "EVERY_CASE" in os.environ:
    RESIZED |= {"2to3": ((2, 12), (3, None)), "1to2": ((1, 4), (2, None))}
WINDOWS, EPOCHS, SAMPLES = 97, 2, 12
COLUMNS = {"columns": 8, "fixed-columns": 4}
UNITS = {"windows": WINDOWS, "columns": 13, "fixed-windows": WINDOWS, "fixed-columns": 25}
RESIZED_CASE = plain.Case("resized", "adamw", 8e-3, warmup_steps=3)


def batch_words(batching, dp):
    """By hand for each number of ranks, or one setting for all: a step of 12 windows, or of 3 stretches of columns."""
    if not batching.startswith("fixed"):
        size, rounds = (COLUMNS[batching], 1) if batching == "columns" else {1: (6, 2), 2: (6, 1), 3: (4, 1)}[dp]
        return [f"training.batch_size={size}", f"training.accumulation={rounds}"]
    size = COLUMNS.get(batching, 5)
    total = 3 * size if batching == "fixed-columns" else SAMPLES
    return [
        f"training.batch_size={size}",
        f"training.global_batch_size={total}",
        "optimizer.lr_scaling=linear",
        f"optimizer.lr={RESIZED_CASE.lr * size / total!r}",
    ]


@pytest.fixture(scope="module")
def resized(world, tmp_path_factory):
    """All parts of all runs: FOLDER/BATCHING-NAME, and the unbroken FOLDER/windows-unbroken."""
    folder = tmp_path_factory.mktemp("resized")
    corpus = write_corpus(folder / "text", train=(WINDOWS + 1) * 12 + 5)

    def words(batching, name, dp, last):
        return [
            *tiny(corpus),
            *RESIZED_CASE.words(dp),
            *batch_words(batching, dp),
            f"data.batching={batching.removeprefix('fixed-')}",
            f"training.epochs={EPOCHS}",
            f"training.max_steps={last}",
        ]

    parts = {name: list(plan) for name, plan in RESIZED.items()}
    for dp in (2, 1, 3, 2):
        now = [(name, plan.pop(0)[1]) for name, plan in parts.items() if plan and plan[0][0] == dp]
        runs = [(batching, name, last) for name, last in now for batching in UNITS]
        if not (folder / "windows-unbroken").exists():
            runs.append(("windows", "unbroken", None))
        for batching, name, last in runs:
            run = folder / f"{batching}-{name}"
            world(dp).call("recorded:train", str(run), words(batching, name, dp, last))
    assert not any(parts.values())
    return folder


@pytest.mark.parametrize("name", RESIZED)
@pytest.mark.parametrize("batching", UNITS)
def test_another_number_of_ranks_sees_each_remaining_sample_once(resized, batching, name):
    run = resized / f"{batching}-{name}"
    units = UNITS[batching]
    taken = [line for file in resized.glob(f"units-{run.name}-*") for line in file.read_text().splitlines()]
    assert Counter(taken) == {f"{epoch} {unit}": 1 for epoch in range(EPOCHS) for unit in range(units)}
    position = state(run)["position"]
    assert (position["epoch"], position["remaining"]) == (EPOCHS, None)
    assert position["samples"] == EPOCHS * units * COLUMNS.get(batching, 1)
    assert [line["step"] for line in lines(run) if "loss" in line] == list(range(1, position["step"] + 1))


@pytest.mark.parametrize("name", RESIZED)
def test_another_number_of_ranks_trains_the_same_weights(resized, name):
    difference = relative_difference(weights(resized / f"windows-{name}"), weights(resized / "windows-unbroken"))
    print(f"{name}: largest relative difference {difference:.1e}")
    assert difference < 1e-9


@pytest.mark.parametrize("name", RESIZED)
@pytest.mark.parametrize("batching", ["fixed-windows", "fixed-columns"])
def test_with_a_fixed_global_batch_another_number_of_ranks_goes_on_with_the_same_curve(resized, batching, name):
    """One command for any number of ranks, against plain torch that never stopped."""
    tokens, total = plain.encode(resized / "text", "train"), 3 if batching in COLUMNS else SAMPLES
    case = replace(RESIZED_CASE, num_steps=EPOCHS * -(-UNITS[batching] // total))
    every = (
        plain.column_steps(tokens, case, COLUMNS[batching], dp=3, rounds=1)
        if batching in COLUMNS
        else plain.window_steps(tokens, case, SAMPLES)
    )
    wanted = plain.train(resized / "text", case, [*tiny(resized / "text"), *case.words(dp=1)], every)
    run = resized / f"{batching}-{name}"
    found = steps(run, "loss", "grad_norm", "lr")
    assert [line[0] for line in found] == list(range(1, case.num_steps + 1))
    for line, *numbers in zip(found, wanted.losses, wanted.norms, wanted.rates, strict=True):
        assert line[1:] == pytest.approx(numbers, rel=1e-9)
    assert relative_difference(weights(run), wanted.weights) < 1e-9

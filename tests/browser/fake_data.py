"""Runs, jobs and hosts for the pages' tests, in the shapes of the HTTP interface; some runs grow.

Every kind of text is HTML somewhere: names, tags, keys, values, causes, findings.
"""

import random
import time
from typing import Any

from browser.fake_run import SCRIPT, Run, run_id

_OWNERS = ("ada", "grace", "linus", "barbara")
_TASKS = ("language_model", "translation", "classification")


def config(number: int, task: str, **changes: Any) -> dict[str, Any]:
    return {
        "task": task,
        "seed": number % 7,
        "output_dir": f"/data/runs/{number}",
        "model.num_layers": 12,
        "model.d_model": 768,
        "model.num_heads": 12,
        "model.dropout": 0.1,
        "data.source": "wikitext-103",
        "data.tokenizer": "bpe",
        "data.vocab_size": 32_000,
        "data.sequence_length": 1024,
        "parallel.pipeline": 1,
        "parallel.tensor": 1,
        "parallel.schedule": "1f1b",
        "optimizer.name": "adamw",
        "optimizer.lr": (1e-3, 3e-4, 1e-4)[number % 3],
        "optimizer.clip_norm": 1.0,
        "training.batch_size": 32,
        "training.max_steps": 2000,
        "training.precision": "bf16",
        "checkpoint.every_steps": 200,
        "checkpoint.keep_last": 3,
        "communication.bucket_mb": 32,
    } | changes


def job(number: int, run: Run, **changes: Any) -> dict[str, Any]:
    now = time.time()
    fields = {
        "id": number,
        "name": run.name,
        "owner": run.owner,
        "state": run.state,
        "priority": 0,
        "submitted": now - 7200,
        "needs": {"num_ranks": run.ranks, "min_ranks": run.ranks, "tensor": 1, "gpus_per_rank": 1},
        "output_dir": f"/data/runs/{run.name}",
        "folder": "/home/ada/project",
        "words": ["--preset", "gpt-small"],
        "launch": [],
        "code": "",
        "env_names": [],
        "tags": run.tags,
        "after": [],
        "array": None,
        "time_limit": None,
        "max_retries": 3,
        "retries": 0,
        "stopping": None,
        "reason": "",
        "estimated_start": None,
        "ended": None,
        "run": run.id,
        "allocation": [],
    }
    return fields | changes


def attempt(
    number: int,
    began: float,
    ended: float | None,
    first: int,
    last: int | None,
    code: int | None,
    cause: str,
    *places: tuple[str, int],
) -> dict[str, Any]:
    allocation = [{"host": host, "ranks": ranks, "gpus": list(range(ranks))} for host, ranks in places]
    return {
        "number": number,
        "allocation": allocation,
        "began": began,
        "ended": ended,
        "first_step": first,
        "last_step": last,
        "code": code,
        "cause": cause,
    }


def runs(archived: int) -> list[Run]:
    """A few runs and jobs in every state, then `archived` ones that have ended."""
    now = time.time()
    live = Run(
        1,
        "gpt-small/warmup-2k",
        "RUNNING",
        1180,
        tags=["baseline", "paper"],
        speed=2.0,
        since=now,
        began=now - 5400,
        updated=now,
    )
    live.job = job(
        41,
        live,
        priority=5,
        allocation=[
            {"host": "node1", "ranks": 4, "gpus": [0, 1, 2, 3]},
            {"host": "node2", "ranks": 4, "gpus": [0, 1, 2, 3]},
        ],
        retries=1,
    )
    live.attempts = [
        attempt(
            1, now - 5400, now - 4000, 0, 412, 1, "lost host node5: no heartbeat for 30 s", ("node1", 4), ("node5", 4)
        ),
        attempt(
            2,
            now - 3800,
            now - 2400,
            400,
            760,
            75,
            "stalled at step 760: rank 3 in allreduce",
            ("node1", 4),
            ("node2", 4),
        ),
        attempt(3, now - 2300, None, 760, None, None, "", ("node1", 4), ("node2", 4)),
    ]
    live.samples = [
        {
            "step": 500,
            "samples": [{"prompt": "The history of", "continuation": f"the of the and {SCRIPT} in the town the of"}],
        },
        {
            "step": 1000,
            "samples": [
                {
                    "prompt": "The history of",
                    "continuation": "the town begins with a mill on the river; the first church was built beside it.",
                },
                {"prompt": "In the north", "continuation": "the hills are covered with forest."},
            ],
        },
    ]
    live.late = "rank 3 on host node1: 1.8 times the work of the others"
    spiky = Run(
        2,
        "gpt-large/spike",
        "RUNNING",
        100_000,
        200_000,
        "grace",
        ["long"],
        ranks=16,
        speed=1.0,
        since=now,
        began=now - 90_000,
        updated=now,
        spiky=True,
    )
    spiky.job = job(
        43,
        spiky,
        allocation=[
            {"host": "node3", "ranks": 4, "gpus": [0, 1, 2, 3]},
            {"host": "node4", "ranks": 4, "gpus": [0, 1, 2, 3]},
        ],
    )
    hostile = Run(
        3,
        f"evil {SCRIPT}",
        "FAILED",
        60,
        60,
        "linus",
        ["<b>tag</b>"],
        "classification",
        began=now - 900,
        updated=now - 800,
        more_metrics=(f"x{SCRIPT}", "<script>alert(1)</script>"),
    )
    hostile.job = job(44, hostile, state="FAILED", reason=f"exit code 1: {SCRIPT}", ended=now - 800)
    hostile.attempts = [attempt(1, now - 900, now - 800, 0, 60, 1, f"rank 2: {SCRIPT}", ("node1", 4))]
    waiting = Run(4, "translation/de-en", "QUEUED", None, owner="ada", task="translation", tags=["wmt"])
    waiting.job = job(
        45,
        waiting,
        reason="needs 16 slots, 6 are free; reserved for it from the end of job 43",
        estimated_start=now + 3900,
        priority=2,
    )
    waiting.ranks = waiting.job["needs"]["num_ranks"] = waiting.job["needs"]["min_ranks"] = 16
    held = Run(5, "translation/de-fr", "HELD", None, owner="ada", task="translation", ranks=4)
    held.job = job(46, held)
    starting = Run(6, "classifier/imdb", "STARTING", None, owner="barbara", task="classification", ranks=1)
    starting.job = job(47, starting, allocation=[{"host": "node6", "ranks": 1, "gpus": []}])
    stopping = Run(7, "gpt-small/old", "STOPPING", 900, owner="ada", began=now - 2000, updated=now, ranks=2)
    stopping.job = job(48, stopping, stopping="preempted", allocation=[{"host": "node6", "ranks": 2, "gpus": []}])
    cancelled = Run(8, "gpt-small/typo", "CANCELLED", 12, owner="ada", began=now - 99_000, updated=now - 98_000)
    cancelled.job = job(40, cancelled, ended=now - 98_000)
    tracker = Run(9, "by-hand/tiny", "FINISHED", 20, 20, "", ranks=2, began=now - 200_000, updated=now - 199_900)
    named = [live, spiky, hostile, waiting, held, starting, stopping, cancelled, tracker]
    elastic = Run(10, "gpt-medium/elastic", "QUEUED", None, owner="grace", tags=["elastic"])
    elastic.job = job(49, elastic, reason="waits for job 45, which has a higher priority", estimated_start=now + 5200)
    elastic.job["needs"]["min_ranks"] = 4
    after = Run(11, "gpt-medium/finetune", "QUEUED", None, owner="grace", ranks=4)
    after.job = job(50, after, reason="after job 43, which runs", after=[43])
    named += [elastic, after]
    for run in named:
        run.config = config(run.number, run.task)
        if run.job:
            run.job["state"] = run.state
    hostile.config |= {"data.source": SCRIPT, f"extra.{SCRIPT}": 1}
    return named + [_archived(number, now) for number in range(100, 100 + archived)]


def _archived(number: int, now: float) -> Run:
    chance = random.Random(number)
    task, owner = chance.choice(_TASKS), chance.choice(_OWNERS)
    state = chance.choices(("SUCCEEDED", "FAILED", "CANCELLED"), (8, 1, 1))[0]
    began = now - 3600 * (number - 98)
    step = 2000 if state == "SUCCEEDED" else chance.randrange(50, 1900)
    name = f"sweep-{number // 12}/{task.replace('_', '-')}-{number}"
    run = Run(
        number,
        name,
        state,
        step,
        2000,
        owner,
        [f"sweep-{number // 12}"],
        task,
        chance.choice((2, 4, 8)),
        began=began,
        updated=began + 3000,
    )
    run.config = config(number, task)
    run.job = job(number + 1000, run, submitted=began - 60, ended=began + 3000)
    if state == "FAILED":
        run.job["reason"] = "exit code 1: CUDA out of memory on rank 1"
    return run


def hosts() -> list[dict[str, Any]]:
    """Six hosts: busy, part free, drained, down, one with a launch outside the queue."""

    def host(name: str, slots: int, gpus: int, **changes: Any) -> dict[str, Any]:
        return {
            "name": name,
            "slots": slots,
            "gpus": list(range(gpus)),
            "threads": 8,
            "drained": False,
            "down": "",
            "used": [],
            "load": 0.4,
            "findings": [],
        } | changes

    def use(number: int | None, run: int | None, ranks: int, gpus: list[int], owner: str, name: str) -> dict[str, Any]:
        return {
            "job": number,
            "run": run_id(run) if run else None,
            "ranks": ranks,
            "gpus": gpus,
            "owner": owner,
            "name": name,
        }

    return [
        host(
            "node1",
            8,
            8,
            used=[
                use(41, 1, 4, [0, 1, 2, 3], "ada", "gpt-small/warmup-2k"),
                use(None, None, 2, [4, 5], "linus", "launch of linus"),
            ],
            load=37.2,
        ),
        host("node2", 4, 4, used=[use(41, 1, 4, [0, 1, 2, 3], "ada", "gpt-small/warmup-2k")], load=30.4),
        host(
            "node3",
            4,
            4,
            used=[use(43, 2, 4, [0, 1, 2, 3], "grace", "gpt-large/spike")],
            load=35.8,
            findings=["GPU 2: 3 corrected memory errors since boot"],
        ),
        host("node4", 4, 4, used=[use(43, 2, 4, [0, 1, 2, 3], "grace", "gpt-large/spike")], drained=True, load=31.0),
        host("node5", 8, 8, down="no answer on port 22 since 14:02: connection timed out", load=None),
        host(
            "node6",
            8,
            0,
            used=[use(47, 6, 1, [], "barbara", "classifier/imdb"), use(48, 7, 2, [], "ada", "gpt-small/old")],
            load=11.7,
            findings=[f"clock is 3 s ahead {SCRIPT}"],
        ),
    ]

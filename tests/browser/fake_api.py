"""What the fake service knows and answers: the HTTP interface over data in memory."""

import json
import queue
import re
import threading
import time
from typing import Any

from browser import fake_data
from browser.fake_run import Run, decimated

_MOST_EVENTS = 1000


class Refused(Exception):
    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


class State:
    """What the service knows, and what the tests did to it."""

    def __init__(self, archived: int, queue_on: bool) -> None:
        self.runs = fake_data.runs(archived)
        self.hosts = fake_data.hosts() if queue_on else []
        self.queue_on = queue_on
        self.notes: list[str] = []  # which runs may be missing, and why
        self.calls: list[tuple[str, str, Any]] = []  # changes that arrived
        self.refuse: tuple[int, str] | None = None  # answer of every call from now on
        self.down = False  # connections are closed without an answer
        self.unread = 0  # answers with half of the curves, as of a file that is still being read
        self.head_seconds = 0.0  # how long the answer about a single run takes
        self.streams: list[queue.Queue[str | None]] = []
        self.resumed: list[str] = []  # each Last-Event-ID that arrived
        self.events: list[tuple[int, str]] = []
        self.opening = threading.Event()  # cleared: streams that are asked for are held back
        self.opening.set()
        self.reading = threading.Event()  # cleared: parts of logs that are asked for are held back
        self.reading.set()
        self.held_back = 0  # how many were
        self.log_text = "".join(
            f"line {number}: \x1b[32mstep {number}\x1b[0m loss {2 + 1 / (number + 1):.4f}\n" for number in range(6000)
        )
        self.lock = threading.Lock()

    def run(self, id: str) -> Run:
        found = next((run for run in self.runs if run.id == id), None)
        if found is None:
            raise Refused(404, f"no run {id}")
        return found

    def job(self, number: int) -> dict[str, Any]:
        found = next((run.job for run in self.runs if run.job and run.job["id"] == number), None)
        if found is None:
            raise Refused(404, f"no job {number}")
        return found

    @property
    def last_event(self) -> int:
        return self.events[-1][0] if self.events else 0

    def emit(self, kind: str, data: dict[str, Any]) -> None:
        """Tell every open stream."""
        with self.lock:
            number = self.last_event + 1
            text = f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
            self.events = [*self.events, (number, text)][-_MOST_EVENTS:]
            for stream in self.streams:
                stream.put(text)

    def close_streams(self) -> None:
        with self.lock:
            for stream in self.streams:
                stream.put(None)

    def set_state(self, job: dict[str, Any], state: str, **changes: Any) -> None:
        run = self.run(job["run"])
        run.state = state
        job.update(state=state, **changes)
        self.emit("job", {"id": job["id"], "state": state, "run": run.id})


def row(run: Run, now: float) -> dict[str, Any]:
    step = run.last_step(now)
    metrics = run.metrics(now)
    left = (run.total_steps - step) / run.speed if run.speed and step and run.total_steps else None
    best = {"step": step, "metric": "loss", "value": metrics.get("valid_loss")} if step and step > 100 else {}
    return {
        "id": run.id,
        "name": run.name,
        "state": run.state,
        "job": run.job,
        "user": run.owner or None,
        "tags": run.tags,
        "step": step,
        "total_steps": run.total_steps if step is not None else None,
        "epoch": 1 if step else None,
        "metrics": metrics,
        "best": best,
        "task": run.task,
        "world": run.ranks if step is not None else None,
        "tokens_per_second": metrics.get("tokens_per_second") if run.state == "RUNNING" else None,
        "began": run.began,
        "updated": now if run.state == "RUNNING" else run.updated,
        "estimated_end": now + left if left else None,
        "cause": "",
        "problem": "",
        "config": {},
    }


def details(run: Run, now: float) -> dict[str, Any]:
    step = run.last_step(now)
    ranks = []
    if run.state in ("RUNNING", "STOPPING"):
        places = [part["host"] for part in (run.job or {}).get("allocation", []) for _ in range(part["ranks"])]
        for number in range(run.ranks):
            slow = bool(run.late) and number == 3
            ranks.append(
                {
                    "rank": number,
                    "host": places[number] if number < len(places) else "node1",
                    "step": step,
                    "phase": "backward" if slow else "allreduce",
                    "waits_for": None if slow else "bucket 4",
                    "age": 0.4 + number / 10,
                    "memory": (61 + number % 3) << 30,
                    "work_seconds": 0.324 if slow else 0.18,
                    "work_ratio": 1.8 if slow else 1.0,
                    "tokens_per_second": 5100.0 * (0.55 if slow else 1.0),
                    "late": slow,
                }
            )
    kept = list(range(200, (step or 0) + 1, 200))[-4:]
    checkpoints = [
        {
            "step": at,
            "bytes": 1_492_000_000,
            "time": now - (kept[-1] - at) - 60,
            "best": at == kept[-1],
            "latest": at == kept[-1],
            "metrics": {"valid_loss": run.value("valid_loss", at)},
        }
        for at in kept
    ]
    return row(run, now) | {
        "config": run.config,
        "attempts": run.attempts,
        "ranks": ranks,
        "checkpoints": checkpoints,
        "late": run.late if ranks else None,
        "logs": ["launch", *map(str, range(run.ranks))] if step else [],
        "samples": run.samples,
        "summary": {},
    }


def curves(state: State, id: str, query: dict[str, list[str]]) -> dict[str, Any]:
    run, now = state.run(id), time.time()
    x = one(query, "x") or "step"
    first, last = float(one(query, "from") or "-inf"), float(one(query, "to") or "inf")
    half = state.unread > 0
    state.unread -= half
    answer = {}
    for key in filter(None, (one(query, "keys") or "").split(",")):
        points = [(run.at(x, step), y) for step, y in run.curve(key, now) if first <= run.at(x, step) <= last]
        points = points[: len(points) // 2] if half else points
        xs, ys = decimated_points(points, int(one(query, "width") or 800))
        answer[key] = {"x": xs, "y": ys, "n": len(points)}
    return {
        "keys": answer,
        "available": run.keys() if run.step else [],
        "last_step": run.last_step(now),
        "complete": not half,
    }


def decimated_points(points: list[tuple[float, float | None]], width: int) -> tuple[list[float], list[float | None]]:
    xs, ys = decimated(points, width)
    return xs, [None if y is None else float(f"{y:.6g}") for y in ys]


def one(query: dict[str, list[str]], key: str) -> str:
    return query.get(key, [""])[0]


def matching(state: State, query: dict[str, list[str]]) -> dict[str, Any]:
    now = time.time()

    def fits(run: Run) -> bool:
        wanted = {
            "text": one(query, "text").lower(),
            "state": one(query, "state"),
            "user": one(query, "user"),
            "tag": one(query, "tag"),
        }
        settings = (pair.partition(":") for pair in query.get("where", []))
        return (
            wanted["text"] in run.name.lower()
            and wanted["state"] in ("", run.state)
            and wanted["user"] in ("", run.owner)
            and (not wanted["tag"] or wanted["tag"] in run.tags)
            and all(str(run.config.get(key)) == value for key, _, value in settings)
        )

    found = [run for run in state.runs if fits(run)]
    rows = [row(run, now) for run in found]
    key = (one(query, "sort") or "updated").replace("turn", "estimated_start")

    def value(item: dict[str, Any]) -> Any:
        job = item["job"] or {}
        if key == "job":
            return job.get("id")
        found = item["metrics"].get(key, item.get(key, job.get(key)))
        return job.get("submitted") if found is None and key in ("began", "updated") else found

    known = [item for item in rows if value(item) is not None]
    rows = sorted(known, key=value, reverse=one(query, "order") != "asc") + [
        item for item in rows if value(item) is None
    ]
    start, limit = int(one(query, "cursor") or 0), int(one(query, "limit") or 50)
    page = rows[start : start + limit]
    for item in page:
        item["config"] = {key: state.run(item["id"]).config.get(key) for key in query.get("config", [])}
    keys = sorted({key for item in rows[:50] for key in item["metrics"]})
    return {
        "items": page,
        "next": str(start + limit) if start + limit < len(rows) else None,
        "total": len(rows),
        "keys": keys,
        "notes": state.notes,
    }


def compared(state: State, query: dict[str, list[str]]) -> dict[str, Any]:
    now = time.time()
    ids = one(query, "runs").split(",")
    known = {run.id for run in state.runs}
    chosen = [state.run(id) for id in ids if id in known]
    rows = [row(run, now) for run in chosen]
    keys = sorted({key for run in chosen for key in run.config})
    differs = {key: [run.config.get(key) for run in chosen] for key in keys}
    metrics = sorted({key for item in rows for key in item["metrics"]})
    return {
        "runs": rows,
        "differs": {key: values for key, values in differs.items() if len({str(value) for value in values}) > 1},
        "final": {key: [item["metrics"].get(key) for item in rows] for key in metrics},
        "missing": [id for id in ids if id not in known],
    }


def change(state: State, job: dict[str, Any], action: str, body: dict[str, Any]) -> dict[str, Any]:
    legal = {
        "cancel": ("HELD", "QUEUED", "STARTING", "RUNNING", "STOPPING"),
        "hold": ("QUEUED", "RUNNING"),
        "release": ("HELD",),
        "retry": ("FAILED", "CANCELLED"),
    }
    if action in legal and job["state"] not in legal[action]:
        raise Refused(409, f"job {job['id']} is {job['state']}: {action} is for {', '.join(legal[action])}")
    active = job["state"] in ("STARTING", "RUNNING")
    if action == "cancel":
        state.set_state(job, "STOPPING" if active else "CANCELLED", stopping="cancelled" if active else None)
    elif action == "hold":
        state.set_state(job, "STOPPING" if active else "HELD", stopping="held" if active else None)
    elif action in ("release", "retry"):
        state.set_state(job, "QUEUED", reason="needs 8 slots, 6 are free")
    elif action == "priority":
        state.set_state(job, job["state"], priority=body["priority"])
    else:
        tags = [tag for tag in job["tags"] if tag not in body.get("remove", [])] + body.get("add", [])
        state.run(job["run"]).tags = tags
        state.set_state(job, job["state"], tags=tags)
    return job


def bulk(state: State, body: dict[str, Any]) -> dict[str, Any]:
    done, errors = [], {}
    for number in body["ids"]:
        try:
            change(state, state.job(number), body["action"], body)
            done.append(number)
        except Refused as error:
            errors[str(number)] = str(error)
    return {"done": done, "errors": errors}


def tag_runs(state: State, body: dict[str, Any]) -> dict[str, Any]:
    for run in map(state.run, body["runs"]):
        run.tags = [tag for tag in run.tags if tag not in body["remove"]] + body["add"]
        state.emit("run", {"id": run.id, "step": run.step})
    return {"done": body["runs"], "errors": {}}


def change_host(state: State, name: str, action: str) -> dict[str, Any]:
    host = next((host for host in state.hosts if host["name"] == name), None)
    if host is None:
        raise Refused(404, f"no host {name}")
    if action == "remove":
        state.hosts.remove(host)
    else:
        host["drained"] = action == "drain"
    state.emit("hosts", {})
    return {}


def add_hosts(state: State, body: dict[str, Any]) -> dict[str, Any]:
    for part in body["hosts"].split(","):
        if not re.fullmatch(r"[\w.-]+:\d+", part):
            raise Refused(422, f"hosts: {part}: expected NAME:SLOTS")
        name, _, slots = part.partition(":")
        state.hosts.append(
            {
                "name": name,
                "slots": int(slots),
                "gpus": [],
                "threads": 0,
                "drained": False,
                "down": "",
                "used": [],
                "load": None,
                "findings": [],
            }
        )
    state.emit("hosts", {})
    return {}


def log_part(state: State, query: dict[str, list[str]]) -> dict[str, Any]:
    if not state.reading.is_set():
        state.held_back += 1
        state.reading.wait()
    data = (f"log of {one(query, 'rank')}\n" + state.log_text).encode()
    limit = int(one(query, "limit") or 65536)
    start = int(one(query, "offset") or 0)
    if "tail" in query:  # from the beginning of a line
        start = max(0, len(data) - int(one(query, "tail")))
        start = data.find(b"\n", start - 1) + 1 if start else 0
    part = data[start : start + limit]
    part = part[: part.rfind(b"\n") + 1]  # whole lines
    return {"text": part.decode(errors="replace"), "offset": start, "next": start + len(part), "size": len(data)}

"""The table of runs, one run, its curves and its logs, over HTTP."""

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from web_service import Running, running

from hvd_transformer.service.jobs import Placement, State
from hvd_transformer.service.runs import folders

RUNS = "/api/v1/runs"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as found:
        yield found


@pytest.fixture
def token(service: Running) -> str:
    return service.token("ann")


def get(service: Running, path: str, token: str) -> Any:
    answer = service.request("GET", path, token=token)
    assert answer.status == 200, answer
    return answer.json


def test_runs_and_jobs_are_one_table(service: Running, token: str) -> None:
    alone = service.make_run(
        "alone", {"optimizer.lr": 0.1}, [{"step": 1, "loss": 2.0}, {"step": 5, "loss": 1.5, "lr": 0.1}]
    )
    waiting = service.submit(token, words=["optimizer.lr=0.2"], tags=["new"])
    begun = service.submit(token)
    service.make_run(Path(begun["output_dir"]).name, lines=[{"step": 2, "loss": 3.0}])
    page = get(service, f"{RUNS}?config=optimizer.lr&config=unknown", token)
    rows = {row["id"]: row for row in page["items"]}
    assert set(rows) == {alone, waiting["run"], begun["run"]}
    assert (page["total"], page["next"], set(page["keys"])) == (3, None, {"loss", "lr"})
    assert (rows[alone]["job"], rows[alone]["metrics"], rows[alone]["step"]) == (None, {"loss": 1.5, "lr": 0.1}, 5)
    assert rows[alone]["config"] == {"optimizer.lr": 0.1}
    assert (rows[waiting["run"]]["state"], rows[waiting["run"]]["step"]) == ("QUEUED", None)
    assert (rows[waiting["run"]]["config"], rows[waiting["run"]]["tags"]) == ({"optimizer.lr": "0.2"}, ["new"])
    assert rows[waiting["run"]]["job"] == waiting
    assert (rows[begun["run"]]["state"], rows[begun["run"]]["metrics"]) == ("QUEUED", {"loss": 3.0})
    assert rows[begun["run"]]["user"] == "ann"


def test_filters_and_pages(service: Running, token: str) -> None:
    runs = {service.make_run(f"r{i}", {"seed": i % 2}, [{"step": i, "loss": float(i)}]): i for i in range(7)}
    found, cursor = [], ""
    while True:
        page = get(service, f"{RUNS}?sort=loss&order=asc&limit=2&where=seed:1{cursor}", token)
        found += [runs[row["id"]] for row in page["items"]]
        assert page["total"] == 3
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert found == [1, 3, 5]
    assert [runs[row["id"]] for row in get(service, f"{RUNS}?text=R3", token)["items"]] == [3]
    nothing = {"items": [], "next": None, "total": 0, "keys": [], "notes": []}
    assert get(service, f"{RUNS}?user=nobody", token) == nothing


def test_users_are_told_which_runs_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_FOLDERS", 2)
    with running(tmp_path) as service:
        run = service.make_run("zz-first")
        for name in ("a", "b", "c"):
            (tmp_path / "runs" / name).mkdir()
        service.runs.refresh()
        page = get(service, RUNS, service.token("ann"))
        assert [row["id"] for row in page["items"]] == [run]
        assert [line.partition(" has more than ")[0] for line in page["notes"]] == [f"{tmp_path}/runs"]


def test_a_table_sorted_by_long_values_has_a_second_page(service: Running, token: str) -> None:
    """The cursor holds one of them."""
    runs = [service.make_run(f"long {place}", {"data": {"source": f"{'/данные' * 500}/{place}"}}) for place in "ab"]
    query = f"{RUNS}?sort=data.source&order=asc&limit=1"
    first = get(service, query, token)
    second = get(service, f"{query}&cursor={first['next']}", token)
    assert [row["id"] for page in (first, second) for row in page["items"]] == runs


def test_runs_without_a_job_are_tagged(service: Running, token: str) -> None:
    first, second = service.make_run("first"), service.make_run("second")
    job = service.submit(token, tags=["of the job"])
    unknown = "0" * 12
    body = {"runs": [first, job["run"], unknown, second], "add": ["paper", "old"]}
    answer = service.request("POST", f"{RUNS}/tags", body, token=token)
    assert (answer.status, answer.json["done"]) == (200, [first, second])
    assert answer.json["errors"] == {
        job["run"]: f"run {job['run']} is that of job {job['id']}: change the job's tags",
        unknown: f"run {unknown}: no such run",
    }
    body = {"runs": [first], "add": ["new"], "remove": ["old", "never"]}
    assert service.request("POST", f"{RUNS}/tags", body, token=token).status == 200
    found = {row["id"]: row["tags"] for row in get(service, RUNS, token)["items"]}
    assert found == {first: ["new", "paper"], second: ["old", "paper"], job["run"]: ["of the job"]}
    assert [row["id"] for row in get(service, f"{RUNS}?tag=new", token)["items"]] == [first]
    assert get(service, f"{RUNS}/{second}", token)["tags"] == ["old", "paper"]


@pytest.mark.parametrize(
    ("field", "value"), [("runs", []), ("runs", ["x"]), ("runs", ["A" * 12]), ("add", [" a"]), ("add", ["x" * 101])]
)
def test_wrong_tags_are_refused(service: Running, token: str, field: str, value: list[str]) -> None:
    run = service.make_run("one")
    answer = service.request("POST", f"{RUNS}/tags", {"runs": [run], "add": ["a"], field: value}, token=token)
    assert (answer.status, bool(answer.error)) == (422, True)
    assert get(service, f"{RUNS}/{run}", token)["tags"] == []


def test_the_order_of_estimated_ends(service: Running, token: str) -> None:
    first, second, unknown = (service.submit(token) for _ in range(3))
    service.manager.ends.update({first["id"]: 90.0, second["id"]: 80.0})
    page = get(service, f"{RUNS}?sort=estimated_end&order=asc", token)
    assert [(row["job"]["id"], row["estimated_end"]) for row in page["items"]] == [
        (second["id"], 80.0),
        (first["id"], 90.0),
        (unknown["id"], None),
    ]


@pytest.mark.parametrize(
    "query", ["where=seed", "where=:1", "limit=0", "order=up", "cursor=x", "keys=a", "text=a&text=b"]
)
def test_wrong_queries_are_refused(service: Running, token: str, query: str) -> None:
    answer = service.request("GET", f"{RUNS}?{query}", token=token)
    assert answer.status == 422
    assert answer.error.startswith(query.partition("=")[0])


def test_one_run(service: Running, token: str) -> None:
    job = service.submit(token, num_ranks=2)
    service.store.start(job["id"], (Placement("h1", 2, (0, 1)),), 50.0)
    before = get(service, f"{RUNS}/{job['run']}", token)
    assert (before["state"], before["ranks"], before["checkpoints"], before["logs"]) == ("STARTING", [], [], [])
    folder = Path(job["output_dir"])
    service.make_run(folder.name, {"seed": 7}, [{"step": 4, "loss": 1.0}, {"step": 4, "valid_loss": 2.0}])
    (folder / "logs" / "rank-000.log").write_text("hello\n")
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000004" / "MANIFEST.json").write_text('{"files": {"a": {"size": 10}}}')
    (folder / "checkpoints" / "best").symlink_to("step-00000004")
    service.manager.ends[job["id"]] = 99.0
    shown = get(service, f"{RUNS}/{job['run']}", token)
    assert shown["config"]["seed"] == 7
    assert [attempt["began"] for attempt in shown["attempts"]] == [50.0]
    assert shown["job"]["allocation"] == [{"host": "h1", "ranks": 2, "gpus": [0, 1]}]
    (checkpoint,) = shown["checkpoints"]
    assert (checkpoint["step"], checkpoint["bytes"], checkpoint["best"], checkpoint["latest"]) == (4, 10, True, False)
    assert checkpoint["metrics"] == {"valid_loss": 2.0}
    assert (shown["logs"], shown["estimated_end"], shown["problem"]) == (["0"], 99.0, "")


def test_an_unreadable_run_says_why(service: Running, token: str) -> None:
    run = service.make_run("broken")
    (service.folder / "runs" / "broken" / "config.yaml").write_text("{")
    service.runs.refresh()
    assert get(service, f"{RUNS}/{run}", token)["problem"] == "config.yaml cannot be read"


def test_curves_have_their_spike_and_their_gaps(service: Running, token: str) -> None:
    lines: list[Any] = [{"step": step, "loss": 1.0 + step / 1e6} for step in range(5000)]
    lines[1234]["loss"] = 77.0
    lines[10:13] = ['{"step": 10, "loss": NaN}', '{"step": 11, "loss": Infinity}', '{"step": 12, "lo']
    run = service.make_run("curve", lines=lines)
    answer = get(service, f"{RUNS}/{run}/metrics?keys=loss,none&width=50", token)
    loss = answer["keys"]["loss"]
    assert answer["available"] == ["loss"]
    assert (answer["last_step"], answer["complete"]) == (4999, True)
    assert answer["keys"]["none"] == {"x": [], "y": [], "n": 0}
    assert 50 <= len(loss["x"]) <= 100
    assert loss["y"][loss["x"].index(1234)] == 77.0 == max(y for y in loss["y"] if y is not None)
    part = get(service, f"{RUNS}/{run}/metrics?keys=loss&from=1230.5&to=1236&width=4000", token)["keys"]["loss"]
    assert part["x"] == [1231, 1232, 1233, 1234, 1235, 1236]
    gaps = get(service, f"{RUNS}/{run}/metrics?keys=loss&from=9&to=13", token)["keys"]["loss"]
    assert gaps["y"][:3] == [pytest.approx(1.0 + 9 / 1e6), None, None]


def test_values_that_json_has_not_are_null(service: Running, token: str) -> None:
    run = service.make_run("odd", {"a": math.inf, "b": [math.nan]}, [{"step": 1, "loss": 1.0}])
    answer = service.request("GET", f"{RUNS}/{run}", token=token)
    assert answer.status == 200
    assert b"NaN" not in answer.body
    assert b"Infinity" not in answer.body


@pytest.mark.parametrize(
    "query",
    ["width=0", "width=4001", "x=time", "from=NaN", "to=inf", "first=1", "keys=" + ",".join(map(str, range(201)))],
)
def test_wrong_ranges_are_refused(service: Running, token: str, query: str) -> None:
    run = service.make_run("curve")
    answer = service.request("GET", f"{RUNS}/{run}/metrics?{query}", token=token)
    assert answer.status == 422
    assert answer.error.startswith(query.partition("=")[0])


def test_pages_of_a_log(service: Running, token: str) -> None:
    run = service.make_run("logged")
    logs = service.folder / "runs" / "logged" / "logs"
    (logs / "rank-000.log").write_text("one\ntwo\nthree\n")
    (logs / "launch.log").write_text("<b>launched</b>\n")
    first = get(service, f"{RUNS}/{run}/log?limit=9", token)
    assert first == {"text": "one\ntwo\n", "offset": 0, "next": 8, "size": 14}
    assert get(service, f"{RUNS}/{run}/log?rank=0&offset=8", token)["text"] == "three\n"
    assert get(service, f"{RUNS}/{run}/log?tail=7", token)["text"] == "three\n"
    assert get(service, f"{RUNS}/{run}/log?rank=launch", token)["text"] == "<b>launched</b>\n"
    missing = service.request("GET", f"{RUNS}/{run}/log?rank=5", token=token)
    assert (missing.status, "logs: launch, 0" in missing.error) == (404, True)
    assert service.request("GET", f"{RUNS}/{run}/log?offset=-1", token=token).status == 422
    job = service.submit(token)
    missing = service.request("GET", f"{RUNS}/{job['run']}/log", token=token)
    assert (missing.status, missing.error) == (404, f"{job['output_dir']}: no log yet")
    cancelled = service.submit(token)
    service.store.update(cancelled["id"], state=State.CANCELLED, ended=8.0)
    missing = service.request("GET", f"{RUNS}/{cancelled['run']}/log", token=token)
    assert missing.error == f"job {cancelled['id']} has no log: it became CANCELLED before it was started"
    early = Path(job["output_dir"]) / "logs"  # it has failed before it had a configuration
    early.mkdir(parents=True)
    (early / "launch.log").write_text("hvd-train: data.source=/nope: no such file or folder\n")
    assert get(service, f"{RUNS}/{job['run']}", token)["logs"] == ["launch"]
    assert "/nope" in get(service, f"{RUNS}/{job['run']}/log?rank=launch", token)["text"]


def test_runs_side_by_side(service: Running, token: str) -> None:
    same = {"task": "language_model", "model.d_model": 8}
    first = service.make_run("a", {**same, "optimizer.lr": 0.1}, [{"step": 1, "loss": 2.0}])
    second = service.make_run("b", {**same, "optimizer.lr": 0.2}, [{"step": 1, "loss": 1.0, "bleu": 3.0}])
    answer = get(service, f"/api/v1/compare?runs={second},{first}", token)
    assert [row["id"] for row in answer["runs"]] == [second, first]
    assert answer["differs"] == {"optimizer.lr": [0.2, 0.1]}
    assert answer["final"] == {"loss": [1.0, 2.0], "bleu": [3.0, None]}
    job = service.submit(token, words=["optimizer.lr=0.3"])
    waiting = get(service, f"/api/v1/compare?runs={first},{job['run']}", token)
    assert waiting["differs"]["optimizer.lr"] == [0.1, "0.3"]
    gone = get(service, f"/api/v1/compare?runs={'0' * 12},{first},x", token)
    assert ([row["id"] for row in gone["runs"]], gone["missing"]) == ([first], ["0" * 12, "x"])
    for runs, status in (("", 422), (",".join(f"{n:012x}" for n in range(21)), 422), ("0" * 12, 404)):
        assert service.request("GET", f"/api/v1/compare?runs={runs}", token=token).status == status


def test_a_run_directory_with_anything_in_it_is_shown(service: Running, token: str) -> None:
    """Its files may be another program's."""
    runs = [service.make_run(f"odd-{number}", {"task": task}, [{"step": 1}]) for number, task in enumerate([3, ["a"]])]
    summary = {"status": "finished", "valid_\ud800": 1.0}
    (service.folder / "runs" / "odd-0" / "summary.json").write_text(json.dumps(summary))
    (service.folder / "runs" / "odd-1" / "summary.json").write_text('{"a": ' + "[" * 600 + "]" * 600 + "}")
    service.runs.refresh()
    rows = {row["id"]: row for row in get(service, RUNS, token)["items"]}
    assert [rows[run]["task"] for run in runs] == [None, None]


def test_all_metrics_that_a_run_may_have_are_read_at_once(service: Running, token: str) -> None:
    keys = [f"valid_a_source_with_quite_a_long_name_{number}_loss" for number in range(200)]
    run = service.make_run("many", {}, [{"step": 1, **dict.fromkeys(keys, 1.0)}])
    found = get(service, f"{RUNS}/{run}/metrics?keys={','.join(keys)}", token)["keys"]
    assert found.keys() == set(keys)
    more = service.request("GET", f"{RUNS}/{run}/metrics?keys={','.join([*keys, 'x'])}", token=token)
    assert "201 are too many" in more.error


def test_curves_are_packed_for_who_takes_that(service: Running, token: str) -> None:
    lines = [{"step": step, "loss": 1 / (step + 1)} for step in range(1000)]
    path = f"{RUNS}/{service.make_run('packed', {}, lines)}/metrics?keys=loss&width=400"
    plain = service.request("GET", path, token=token)
    packed = service.request("GET", path, headers={"Accept-Encoding": "gzip, br"}, token=token)
    assert (plain.headers.get("content-encoding"), packed.headers["content-encoding"]) == (None, "gzip")
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < 0.6 * len(plain.body)
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"
    small = service.request("GET", "/health", headers={"Accept-Encoding": "gzip"})
    assert small.json == {"status": "ok"}

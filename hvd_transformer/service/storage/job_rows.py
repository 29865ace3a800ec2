"""Jobs as rows of the database: how they are written, read and searched."""

import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from hvd_transformer.service.jobs import ID, Cause, Engine, Job, Needs, State
from hvd_transformer.service.storage.new_job import NewJob

# What never changes and no query looks for: one text of JSON per job.
_REQUEST = ("folder", "words", "launch", "sbatch", "config", "env_names", "env_file")

_SELECT = """
    SELECT jobs.*, requests.body,
        (SELECT json_group_array(tag) FROM tags WHERE job = jobs.id) AS tags,
        (SELECT json_group_array(after) FROM dependencies WHERE job = jobs.id) AS after
    FROM jobs JOIN requests ON requests.job = jobs.id
"""


def insert(connection: sqlite3.Connection, number: int, array: int | None, new: NewJob) -> None:
    """Write a new job with the id `number`."""
    output_dir = new.output_dir.replace(ID, str(array or number))
    row = {
        **vars(new),
        **vars(new.needs),
        "id": number,
        "array": array,
        "state": State.HELD if new.held else State.QUEUED,
        "output_dir": output_dir,
        "words": [f"output_dir={output_dir}" if word.startswith("output_dir=") else word for word in new.words],
        "config": {key: output_dir if key == "output_dir" else value for key, value in new.config.items()},
    }
    request = {key: row[key] for key in _REQUEST}
    connection.execute(
        "INSERT INTO jobs (id, name, owner, state, priority, submitted, num_ranks, min_ranks, tensor, gpus_per_rank,"
        " output_dir, array, code, time_limit, max_retries, engine) VALUES (:id, :name, :owner, :state, :priority,"
        " :submitted, :num_ranks, :min_ranks, :tensor, :gpus_per_rank, :output_dir, :array, :code, :time_limit,"
        " :max_retries, :engine)",
        row,
    )
    connection.execute("INSERT INTO requests VALUES (?, ?)", (number, json.dumps(request)))
    connection.executemany("INSERT INTO tags VALUES (?, ?)", ((number, tag) for tag in set(new.tags)))
    connection.executemany("INSERT INTO dependencies VALUES (?, ?)", ((number, job) for job in set(new.after)))


def read(connection: sqlite3.Connection, number: int) -> Job | None:
    """The job `number`; None if there is none."""
    row = connection.execute(f"{_SELECT} WHERE jobs.id = ?", (number,)).fetchone()
    return None if row is None else _job(row)


def page(
    connection: sqlite3.Connection,
    states: Iterable[State] | None,
    owner: str | None,
    tag: str | None,
    engine: Engine | None,
    after_id: int | None,
    limit: int | None,
    newest_first: bool,
) -> list[Job]:
    """See `Store.jobs`. Reads no more rows than it returns, but for those with the tag that do not match the rest."""
    wanted = sorted(State if states is None else set(states))
    if not wanted:
        return []
    order = "DESC" if newest_first else ""
    column = "id" if tag is None else "tags.job"  # of the index that has the order
    beyond = "" if after_id is None else f" AND {column} {'<' if newest_first else '>'} :after_id"
    whose = "" if owner is None else " AND owner = :owner"
    whose += "" if engine is None else " AND engine = :engine"
    names = ", ".join(f"'{state.value}'" for state in wanted)
    if tag is not None:
        matches = f"tag = :tag AND state IN ({names}){whose}{beyond}"
        ids = f"SELECT tags.job FROM tags CROSS JOIN jobs ON id = tags.job WHERE {matches}"
    elif states is None and owner is None and engine is None:
        ids = f"SELECT id FROM jobs WHERE true{beyond}"
    else:  # one ordered part of an index per state, which SQLite merges
        ids = " UNION ALL ".join(f"SELECT id FROM jobs WHERE state = '{s.value}'{whose}{beyond}" for s in wanted)
    query = f"{_SELECT} WHERE jobs.id IN ({ids} ORDER BY {column} {order} LIMIT :limit) ORDER BY jobs.id {order}"
    most = -1 if limit is None else limit
    values = {"owner": owner, "tag": tag, "engine": engine, "after_id": after_id, "limit": most}
    return [_job(row) for row in connection.execute(query, values)]


def by_output(connection: sqlite3.Connection, folders: Iterable[str]) -> dict[str, Job]:
    """See `Store.jobs_by_output`."""
    newest = "SELECT max(id) FROM jobs WHERE output_dir IN (SELECT value FROM json_each(?)) GROUP BY output_dir"
    rows = connection.execute(f"{_SELECT} WHERE jobs.id IN ({newest})", (json.dumps(list(folders)),))
    return {row["output_dir"]: _job(row) for row in rows}


def conflict(connection: sqlite3.Connection, number: int) -> Job | None:
    """A job that has not ended and might run at the same time in the run directory of the job `number`.

    Of two jobs of which one waits for the other, also through a third, only one runs at a time.
    """
    query = """
        WITH RECURSIVE
            earlier (id) AS (
                SELECT after FROM dependencies WHERE job = :id
                UNION SELECT after FROM dependencies JOIN earlier ON job = earlier.id
            ),
            later (id) AS (
                SELECT job FROM dependencies WHERE after = :id
                UNION SELECT job FROM dependencies JOIN later ON after = later.id
            )
        SELECT max(id) FROM jobs WHERE output_dir = (SELECT output_dir FROM jobs WHERE id = :id) AND ended IS NULL
            AND id != :id AND id NOT IN earlier AND id NOT IN later
    """
    (found,) = connection.execute(query, {"id": number}).fetchone()
    return None if found is None else read(connection, found)


def _job(row: sqlite3.Row) -> Job:
    request: dict[str, Any] = json.loads(row["body"])
    return Job(
        id=row["id"],
        name=row["name"],
        owner=row["owner"],
        state=State(row["state"]),
        priority=row["priority"],
        submitted=row["submitted"],
        needs=Needs(row["num_ranks"], row["min_ranks"], row["tensor"], row["gpus_per_rank"]),
        output_dir=row["output_dir"],
        folder=request["folder"],
        words=tuple(request["words"]),
        launch=tuple(request["launch"]),
        engine=Engine(row["engine"]),
        sbatch=tuple(request.get("sbatch", ())),  # older jobs have none
        config=request["config"],
        env_names=tuple(request["env_names"]),
        env_file=request["env_file"],
        code=row["code"],
        tags=tuple(sorted(json.loads(row["tags"]))),
        after=tuple(sorted(json.loads(row["after"]))),
        array=row["array"],
        time_limit=row["time_limit"],
        max_retries=row["max_retries"],
        retries=row["retries"],
        stopping=None if row["stopping"] is None else Cause(row["stopping"]),
        reason=row["reason"],
        estimated_start=row["estimated_start"],
        ended=row["ended"],
    )

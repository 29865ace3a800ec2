"""The attempts of jobs that another scheduler runs: Slurm or Kubernetes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hvd_transformer.service.jobs import ACTIVE, Engine, State
from hvd_transformer.service.storage.attempt_table import AttemptTable


@dataclass(frozen=True)
class ExternalAttempt:
    """An open attempt. `external`: its id there; None: nobody knows whether the scheduler has it."""

    job: int
    number: int
    engine: Engine
    state: State
    reason: str
    external: str | None
    asked_to_stop: bool


class ExternalTable(AttemptTable):
    """They take no slots, and their jobs are active until they have ended there."""

    def external_attempts(self) -> list[ExternalAttempt]:
        """All that have not ended. Light rows: there may be thousands, looked at every few seconds."""
        query = (
            "SELECT job, number, engine, state, reason, external, asked_to_stop FROM jobs"
            f" CROSS JOIN attempts ON job = jobs.id WHERE {_ELSEWHERE} AND attempts.ended IS NULL ORDER BY job"
        )
        with self.database.read() as connection:
            return [
                ExternalAttempt(job, number, Engine(engine), State(state), reason, external, bool(asked))
                for job, number, engine, state, reason, external, asked in connection.execute(query)
            ]

    def external_owners(self) -> Counter[str]:
        """How many jobs of each owner other schedulers have."""
        with self.database.read() as connection:
            rows = connection.execute(f"SELECT owner, count(*) FROM jobs WHERE {_ELSEWHERE} GROUP BY owner")
            return Counter({row[0]: row[1] for row in rows})

    def set_external(self, job: int, number: int, external: str) -> None:
        """The id that an attempt has there."""
        with self.database.write() as connection:
            query = "UPDATE attempts SET external = ? WHERE job = ? AND number = ?"
            connection.execute(query, (external, job, number))
            self.changed(connection, "job", [job])

    def set_waited(self, jobs: Mapping[int, float]) -> None:
        """When jobs were last seen to wait for their scheduler: what passes before is no running time."""
        query = "UPDATE attempts SET began = max(began, ?) WHERE job = ? AND ended IS NULL AND waits"
        if jobs:
            with self.database.write(durable=False) as connection:
                connection.executemany(query, [(seen, job) for job, seen in jobs.items()])

    def begin_external(self, job: int, number: int, reason: str, since: float) -> None:
        """Its ranks run: STARTING → RUNNING. What passes after `since`, when it was last seen to wait, is running time.

        What passed while no service looked thus is, too.
        """
        with self.database.write() as connection:
            connection.execute(
                "UPDATE attempts SET began = max(began, ?), waits = 0 WHERE job = ? AND number = ?",
                (since, job, number),
            )
            self._write(connection, self._known(connection, job), {"state": State.RUNNING, "reason": reason})

    def set_ran(self, job: int, number: int, since: float) -> None:
        """Its ranks ran, though nobody saw them begin: what passes after `since` is running time."""
        with self.database.write() as connection:
            query = "UPDATE attempts SET began = max(began, ?), waits = 0 WHERE job = ? AND number = ? AND waits"
            connection.execute(query, (since, job, number))

    def withdraw(self, job: int, number: int, reason: str) -> None:
        """Forget an attempt that was never handed over: STARTING → QUEUED. Does nothing if its job is being stopped.

        Its number is used again: should the scheduler have it after all, it is found by its name.
        """
        with self.database.write() as connection:
            known = self._known(connection, job)
            if known.state is State.STARTING:
                connection.execute("DELETE FROM attempts WHERE job = ? AND number = ?", (job, number))
                self._write(connection, known, {"state": State.QUEUED, "reason": reason})

    def set_asked_to_stop(self, attempts: Iterable[tuple[int, int]]) -> None:
        """The scheduler was asked to stop these attempts, by job and number: a second signal would kill their ranks."""
        query = "UPDATE attempts SET asked_to_stop = 1 WHERE job = ? AND number = ?"
        with self.database.write() as connection:
            connection.executemany(query, list(attempts))

    def set_reasons(self, reasons: Mapping[int, str]) -> None:
        """What the scheduler says of active jobs."""
        with self.database.write(durable=False) as connection:
            query = "UPDATE jobs SET reason = ? WHERE id = ? AND ended IS NULL"
            connection.executemany(query, [(reason, job) for job, reason in reasons.items()])
            self.changed(connection, "job", reasons)


_ELSEWHERE = (
    f"jobs.engine IN ({', '.join(repr(engine.value) for engine in Engine if engine is not Engine.HOSTS)})"
    f" AND jobs.state IN ({', '.join(sorted(repr(state.value) for state in ACTIVE))})"
)

"""All that the service must remember: jobs, attempts, hosts, usage, settings and events, in one database."""

from pathlib import Path

from hvd_transformer.service.storage.database import Database
from hvd_transformer.service.storage.external_table import ExternalTable
from hvd_transformer.service.storage.new_job import NewJob
from hvd_transformer.service.storage.pace_table import PaceTable
from hvd_transformer.service.storage.retention import RetentionTable
from hvd_transformer.service.storage.run_tags import RunTagTable
from hvd_transformer.service.storage.usage_table import UsageTable

__all__ = ["NewJob", "Store"]


class Store(ExternalTable, PaceTable, RetentionTable, RunTagTable, UsageTable):
    """The database `path`. Thread-safe; every change is a transaction, on the disk when the method returns.

    `read_only`: for commands that look while no service runs. Raises `UserError` for all that is wrong with the file
    or its disk, also if another service has it.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        super().__init__(Database(path, read_only))

    def close(self) -> None:
        """Close the database, and let another service have it."""
        self.database.close()

"""How much each owner has used, for the fair share."""

from hvd_transformer.service.scheduling.fair_share import decayed
from hvd_transformer.service.storage.event_log import EventLog


class UsageTable(EventLog):
    """Slot-seconds of each owner, with the moment up to which they have decayed."""

    def usage(self, now: float) -> dict[str, float]:
        """The decayed slot-seconds of each owner."""
        with self.database.read() as connection:
            rows = connection.execute("SELECT owner, slot_seconds, at FROM usage")
            return {owner: decayed(used, now - at) for owner, used, at in rows}

    def add_usage(self, owner: str, slot_seconds: float, now: float) -> None:
        """Count slot-seconds that the owner has used up to now."""
        with self.database.write(durable=False) as connection:
            row = connection.execute("SELECT slot_seconds, at FROM usage WHERE owner = ?", (owner,)).fetchone()
            before = 0.0 if row is None else decayed(row["slot_seconds"], now - row["at"])
            connection.execute("INSERT OR REPLACE INTO usage VALUES (?, ?, ?)", (owner, before + slot_seconds, now))

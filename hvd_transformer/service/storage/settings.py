"""The limits of users and other settings that admins change while the service runs."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage.event_log import EventLog


@dataclass(frozen=True)
class Limits:
    """What the jobs of one user may have at a time. None: as much as there is."""

    max_queued: int | None = None  # held ones included
    max_running: int | None = None
    max_slots: int | None = None  # in use
    disk_bytes: int | None = None  # of run directories


_EVERYONE, _USER, _RETENTION, _ID = "limits", "limits of ", "retention_days", "service_id"


class SettingsTable(EventLog):
    """The settings, each with its type."""

    def limits(self, owner: str) -> Limits:
        """The limits of this user: what is set for the user, else for everyone."""
        of_all = self.all_limits()
        return of_all.get(owner, of_all[None])

    def all_limits(self) -> dict[str | None, Limits]:
        """The limits of everyone (None) and of the users who have their own."""
        found = self._settings()
        limits: dict[str | None, Limits] = {None: Limits(**found.get(_EVERYONE, {}))}
        for key, value in found.items():
            if key.startswith(_USER):
                limits[key.removeprefix(_USER)] = Limits(**value)
        return limits

    def set_limits(self, limits: Limits | None, owner: str | None = None) -> None:
        """Set the limits of a user, or of everyone who has no own ones. None: as nothing had been set.

        Raises `UserError` for a negative limit.
        """
        for field in fields(Limits) if limits is not None else ():
            value = getattr(limits, field.name)
            if value is not None and value < 0:
                raise UserError(f"{field.name}={value}: must be 0 or more, or null for no limit")
        key = _EVERYONE if owner is None else _USER + owner
        self._set(key, None if limits is None else asdict(limits))

    def retention_days(self) -> float | None:
        """For how many days the jobs that have ended are kept. None: for ever."""
        days = self._settings().get(_RETENTION)
        return None if days is None else float(days)

    def set_retention_days(self, days: float | None) -> None:
        """Raises `UserError` for no time at all."""
        if days is not None and not days > 0:
            raise UserError(f"retention_days={days}: must be above 0, or null to keep ended jobs for ever")
        self._set(_RETENTION, days)

    def service_id(self) -> str:
        """Tells this service's jobs from those of others in Slurm and Kubernetes. It is made once."""
        with self.database.write():
            if _ID not in (found := self._settings()):
                self._set(_ID, secrets.token_hex(4))
                found = self._settings()
            return str(found[_ID])

    def _settings(self) -> Mapping[str, Any]:
        with self.database.read() as connection:
            return {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM settings")}

    def _set(self, key: str, value: Any) -> None:
        with self.database.write() as connection:
            connection.execute("DELETE FROM settings WHERE key = ?", (key,))
            if value is not None:
                connection.execute("INSERT INTO settings VALUES (?, ?)", (key, json.dumps(value)))
            self.changed(connection, "settings")

"""How long the launcher waits for hosts and ranks."""

from dataclasses import dataclass

MANY_HOSTS = 64  # above, all limits grow with the number of hosts
_RANK_SILENCE = 12.0  # more than of a host: so that a host that is lost is told as such
_START_SILENCE = 60.0
_LONGEST_SILENCE = 20.0  # that no user asked for: a job with a dead host is to end within half a minute


@dataclass(frozen=True)
class TimeLimits:
    """In seconds.

    `start`: for a host to answer when the job starts or takes it in. `preflight`: for its answer when it is examined
    before; None: a few seconds, as the user set no `start`. `silence`: without a word from a running host,
    after which it is lost. `save`: for ranks that were asked to stop to save.
    """

    start: float = 30.0
    silence: float = 8.0
    save: float = 120.0
    preflight: float | None = None

    @classmethod
    def of(
        cls, num_hosts: int, start: float | None = None, silence: float | None = None, save: float | None = None
    ) -> "TimeLimits":
        """The user's choices, and for None what so many hosts need."""
        longer, few = max(1.0, num_hosts / MANY_HOSTS), cls()
        return cls(
            few.start * longer if start is None else start,
            min(few.silence * longer, _LONGEST_SILENCE) if silence is None else silence,
            few.save * longer if save is None else save,
            preflight=start,
        )

    def rank_silence(self, phase: str) -> float:
        """Without a heartbeat, after which a rank hangs: its process was stopped, or nothing in it can run.

        It tells nobody else, as its watchdog does not run. At the start libraries may keep all threads waiting.
        """
        return _START_SILENCE if phase == "start" else self.silence + _RANK_SILENCE

    @property
    def launcher_silence(self) -> float:
        """Without a word from the launcher, after which a host ends its ranks: it is the host that is cut off."""
        return 1.5 * self.silence

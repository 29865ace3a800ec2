"""Ctrl-C and SIGTERM as a wish: the loop ends the step, saves and leaves."""

import signal
from types import FrameType


class StopRequest:
    """Notes the first SIGINT or SIGTERM; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __bool__(self) -> bool:
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name

    def end_at_once(self) -> None:
        """From now on a signal ends this process: there is nothing to save."""
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)

    def restore(self) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

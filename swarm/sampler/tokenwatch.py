"""Whether an engine that draws samples side by side still draws, as a machine with the time as an argument."""

from __future__ import annotations


class TokenWatch:
    """An engine that has samples to draw, is not paused and has drawn no token for `hang_s` hangs."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._samples = 0
        self._paused = False
        self._alive_at = 0.0

    def begin(self, *, now: float) -> None:
        """A sample is to be drawn."""
        if self._samples == 0:
            self._alive_at = now
        self._samples += 1

    def end(self) -> None:
        """A sample is drawn or given up."""
        self._samples -= 1

    def token(self, *, now: float) -> None:
        self._alive_at = now

    def pause(self) -> None:
        """Nothing is drawn until `resume`; whoever pauses bounds how long."""
        self._paused = True

    def resume(self, *, now: float) -> None:
        self._paused = False
        self._alive_at = now

    def due_s(self, *, now: float) -> float:
        """Seconds until the engine hangs if it draws nothing; 0 or less: it does. Nothing drawn is asked after again
        in a full `hang_s`."""
        if self._samples == 0 or self._paused:
            return self._hang_s
        return self._alive_at + self._hang_s - now

"""A terminal as tests see it: what stands on it after what was written. When it is resized it wraps its lines anew."""

from __future__ import annotations

import re

ESCAPE = re.compile(r"\x1b\[(\?|)([0-9;]*)([A-Za-z])")


class Screen:
    """Rows without end, of which none is ever lost; the cursor knows up, carriage return and new line."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._rows: list[str] = [""]
        self._goes_on: list[bool] = [False]
        self._row = self._column = 0
        self.modes: list[str] = []
        """Private modes that were set or reset, such as ?25l, which hides the cursor."""

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self._rows]

    @property
    def at_rest(self) -> bool:
        """Whether the cursor is where a frame leaves it: below everything."""
        return self._column == 0 and self._row == len(self._rows) - 1

    def resize(self, width: int) -> None:
        """Wrap every line anew. The cursor stands at the beginning of a line of its own."""
        assert self._column == 0
        after = len(self._rows) - self._row
        lines: list[str] = []
        for row, follows in zip(self._rows, [False, *self._goes_on[:-1]], strict=True):
            lines = [*lines[:-1], lines[-1] + row] if follows else [*lines, row]
        self.width, self._rows, self._goes_on = width, [], []
        for line in lines:
            parts = [line[at : at + width] for at in range(0, max(1, len(line)), width)]
            self._rows += parts
            self._goes_on += [True] * (len(parts) - 1) + [False]
        self._row = len(self._rows) - after

    def write(self, text: str) -> None:
        at = 0
        while at < len(text):
            if escape := ESCAPE.match(text, at):
                self._escape(*escape.groups())
                at = escape.end()
                continue
            self._put(text[at])
            at += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._next_row(wraps=False)
        else:
            if self._column == self.width:
                self._next_row(wraps=True)
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
            self._column += 1

    def _next_row(self, *, wraps: bool) -> None:
        self._goes_on[self._row] = wraps
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append("")
            self._goes_on.append(False)

    def _escape(self, private: str, number: str, kind: str) -> None:
        if private:
            self.modes.append(f"?{number}{kind}")
        elif kind == "A":
            self._row = max(0, self._row - int(number or 1))
        elif kind == "K":
            self._rows[self._row] = self._rows[self._row][: self._column]
        elif kind == "J":
            self._rows[self._row] = self._rows[self._row][: self._column]
            del self._rows[self._row + 1 :], self._goes_on[self._row + 1 :]
        else:
            assert kind == "m", f"a terminal has to know ESC[{number}{kind}"

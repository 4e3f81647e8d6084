"""Cuts work into units: the grain of work, of resume and of distribution, with ids that do not depend on who does them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """Rows `start` to `stop` of a plan (half open). `id` names its output files: `u000007`."""

    id: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def cut(rows: int, rows_per_unit: int) -> list[Unit]:
    """`rows` in units of `rows_per_unit`, the last one shorter."""
    starts = range(0, rows, rows_per_unit)
    return [Unit(f"u{i:06d}", start, min(start + rows_per_unit, rows)) for i, start in enumerate(starts)]


@dataclass(frozen=True)
class Part:
    """Every `count`-th unit from number `index` on: the share of one of `count` runs beside each other."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """A part as it is written on the command line, `3/16`; empty for the whole.

        Raises:
            ConfigError: it is not of that form, or there is no such part.
        """
        if not text:
            return cls()
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if not found or int(found[1]) >= int(found[2]):
            raise ConfigError(f"expected --part as i/n with i from 0 to n - 1, as in 3/16, found {text!r}")
        return cls(int(found[1]), int(found[2]))

    @property
    def whole(self) -> bool:
        return self.count == 1

    def of(self, units: Sequence[Unit]) -> list[Unit]:
        """Its units, by their place in the list."""
        return list(units[self.index :: self.count])

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Part()

"""Cuts work into units: the grain of work, of resume and of distribution, with ids that do not depend on who does them."""

from __future__ import annotations

from dataclasses import dataclass


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

"""Counters, waits and their percentiles, and the JSONL files they end in."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import StorageError
from core.storage import Folder


class Series:
    """Durations of one kind of work or wait, in seconds, since the last `take`."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, seconds: float) -> None:
        self.values.append(seconds)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.values.append(time.perf_counter() - start)

    def take(self) -> dict[str, float]:
        """Sum, count, p50 and p99 in seconds, and start over. Zeros where nothing was added."""
        values, self.values = sorted(self.values), []
        if not values:
            return {"sum": 0.0, "n": 0, "p50": 0.0, "p99": 0.0}
        at = len(values) - 1
        return {
            "sum": sum(values),
            "n": len(values),
            "p50": values[round(0.50 * at)],
            "p99": values[round(0.99 * at)],
        }


class Jsonl:
    """A file of one JSON object a line. Each line is one write, so a killed run leaves whole lines (but for the last)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path}: {error.strerror}; see to that and run the same command again to continue"
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows; a last line cut short by a kill is left out, and what a crashed disk made of others."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
        return rows

    def keep(self, wanted: Any) -> None:
        """Rewrite the file with only the rows for which `wanted(row)` holds (a resumed run forgets what it will redo)."""
        if not self.path.exists():
            return
        rows = [row for row in self.rows() if wanted(row)]
        Folder(self.path.parent).write(self.path.name, "".join(json.dumps(row) + "\n" for row in rows).encode())

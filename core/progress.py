"""Progress of long work: a live bar on a terminal, a plain log line every few seconds elsewhere."""

from __future__ import annotations

import datetime
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType

log = logging.getLogger("pairmill.progress")
LOG_EVERY_S = 10.0

Describe = Callable[[Mapping[str, int], float], str]
"""What a stage says of its counts after so many seconds, in place of the most common ones."""


class Progress:
    """Counts `total` things of one `unit` (`rows`, `images`, `steps`) and shows rate, time left and any other counts."""

    def __init__(self, label: str, total: int, unit: str, *, done: int = 0, describe: Describe | None = None) -> None:
        self._describe = describe
        self.label, self.total, self.unit = label, total, unit
        self.done = self.already = done
        self.counts: Counter[str] = Counter()
        self._text = ""
        self._start = self._logged = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(label, total=total, completed=done, text="")
            self._bar.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._log()

    def advance(self, n: int = 0, *, text: str = "", counts: Mapping[str, int] | None = None) -> None:
        """Add `n` finished things and any other counts; `text` replaces the free words at the end of the line."""
        self.done += n
        self.counts.update(counts or {})
        self._text = text or self._text
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, total=self.total, text=self._words())
        elif time.monotonic() - self._logged > LOG_EVERY_S:
            self._log()

    def _words(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        if self._describe is not None:
            counts = self._describe(self.counts, seconds)
        else:
            counts = " ".join(f"{name} {number:,}" for name, number in self.counts.most_common(4))
        return " ".join(
            filter(None, [f"{(self.done - self.already) / seconds:,.1f} {self.unit}/s", counts, self._text])
        )

    def _log(self) -> None:
        self._logged = time.monotonic()
        words = " ".join(filter(None, [self._words(), self._left()]))
        log.info("%s: %s of %s %s, %s", self.label, f"{self.done:,}", f"{self.total:,}", self.unit, words)

    def _left(self) -> str:
        """The time left at the mean speed so far; the bar on a terminal shows its own."""
        new, rest = self.done - self.already, self.total - self.done
        if new <= 0 or rest <= 0:
            return ""
        seconds = (time.monotonic() - self._start) / new * rest
        return f"{datetime.timedelta(seconds=round(seconds))} left"

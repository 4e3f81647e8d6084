"""Every error pairmill raises on purpose.

PairmillError                 a sentence for the user: what was expected, what was found, what to do
├── UsageError                the command or recipe asks for something that cannot be (exit 2)
│   ├── ConfigError           a setting: unknown name, bad value, settings that contradict each other
│   └── InputError            the input: missing column, empty list, unreadable file
├── StorageError              a folder cannot be read or written, the disk is full (exit 3)
├── WorkFolderError           the work folder holds other settings or is in use (exit 4)
├── DataError                 bytes on disk are not what their index says (exit 5)
│   └── ImageError            one image cannot be used; carries the outcome that its row receives
├── HardwareError             a device or an optional package that was asked for is not there (exit 6)
└── RunError                  a run was stopped: too many failures, starved, a worker died (exit 7)

The CLI prints the sentence and exits with the class's code; any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.schema import Outcome


class PairmillError(Exception):
    """Base of all; `str(error)` is one sentence a user can act on."""

    exit_code = 1


class UsageError(PairmillError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class InputError(UsageError):
    pass


class StorageError(PairmillError):
    exit_code = 3


class WorkFolderError(PairmillError):
    exit_code = 4


class DataError(PairmillError):
    exit_code = 5


class ImageError(DataError):
    """One image that cannot be used.

    `outcome` is the closed word its row receives, `detail` the reason in the decoder's or our own words.
    """

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome = outcome
        self.detail = detail

    def __reduce__(self) -> tuple[type[ImageError], tuple[Outcome, str]]:
        return type(self), (self.outcome, self.detail)  # default pickling would replay only the joined message


class HardwareError(PairmillError):
    exit_code = 6


class RunError(PairmillError):
    exit_code = 7


def nearest(name: str, known: Iterable[str]) -> str:
    """A "did you mean" clause for an unknown `name`: the closest of `known`, or all of them when none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known are: " + ", ".join(sorted(known))

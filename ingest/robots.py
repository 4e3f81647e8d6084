"""robots.txt as RFC 9309 has it: groups by product token, wildcards, the longest rule wins.

Way in: the bytes of a site's robots.txt. Way out: `Rules.refusal(path)`, the line that forbids a path, or None.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

LIMIT = 512_000  # bytes read of one file; the RFC asks for 500 KiB at least
_UNRESERVED = frozenset(string.ascii_letters + string.digits + "-._~")


@dataclass(frozen=True)
class Rules:
    """What one site says to us: patterns with whether they allow, in the order of the file."""

    lines: tuple[tuple[str, bool], ...] = ()

    def refusal(self, path: str) -> str | None:
        """The line that forbids `path` (with its query), or None. The longest pattern counts, `Allow` where two tie."""
        path = _normal(path)
        if path == "/robots.txt":
            return None
        fitting = [(len(pattern), allow, pattern) for pattern, allow in self.lines if matches(pattern, path)]
        if not fitting:
            return None
        _, allow, pattern = max(fitting)
        return None if allow else f"Disallow: {pattern}"


def parse(data: bytes, agent: str) -> Rules:
    """The rules for product token `agent`: of all its groups together, else of those for `*`, else none."""
    groups: dict[str, list[tuple[str, bool]]] = {}
    current: list[str] = []
    in_rules = False
    for line in data[:LIMIT].decode("utf-8", errors="replace").removeprefix("\ufeff").splitlines():
        key, colon, value = line.partition("#")[0].partition(":")
        key, value = key.strip().lower(), value.strip()
        if not colon:
            continue
        if key == "user-agent":
            current = [_token(value)] if in_rules else [*current, _token(value)]
            in_rules = False
            groups.setdefault(current[-1], [])
        elif key in ("allow", "disallow"):
            in_rules = True
            if value:  # an empty rule forbids nothing
                for name in current:
                    groups[name].append((_normal(value), key == "allow"))
    return Rules(tuple(groups.get(agent.lower(), groups.get("*", []))))


def _token(value: str) -> str:
    """`PairMill/1.0 (...)` is meant for `pairmill`."""
    return "*" if value.startswith("*") else re.split(r"[/\s]", value.lower(), maxsplit=1)[0]


def matches(pattern: str, path: str) -> bool:
    """Whether `path` begins with `pattern`, in which `*` is any text and a last `$` the end.

    By plain searches, because a hostile pattern can keep a regular expression busy for ever.
    """
    whole = pattern.endswith("$")
    first, *pieces = pattern.removesuffix("$").split("*")
    if not path.startswith(first):
        return False
    at = len(first)
    last = pieces.pop() if whole and pieces else None
    for piece in pieces:
        found = path.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    if last is not None:
        return path.endswith(last) and len(path) - len(last) >= at
    return not whole or at == len(path)


def _normal(path: str) -> str:
    """One spelling for what may be percent-encoded or not."""
    encoded = "".join(c if c.isascii() else "".join(f"%{b:02X}" for b in c.encode()) for c in path)

    def decoded(match: re.Match[str]) -> str:
        char = chr(int(match[1], 16))
        return char if char in _UNRESERVED else match[0].upper()

    return re.sub("%([0-9A-Fa-f]{2})", decoded, encoded)

"""HTML that cannot be forgotten to escape: text becomes markup only through `tag`, which escapes it."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

VOID = frozenset({"img", "input", "meta", "br", "hr", "line", "rect", "path", "circle"})


class Markup(str):
    """Text that is already markup."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: Any) -> Markup:
    """One element. Children that are not Markup are escaped, lists are joined, None is left out.

    Attribute names lose a trailing underscore and take dashes for inner ones (`class_`, `data_tip`); values of None and
    False leave the attribute out, True gives it without a value.
    """
    words = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not children:
        return Markup(f"<{name}{words}>" if name in ("img", "input", "meta", "br", "hr") else f"<{name}{words}/>")
    return Markup(f"<{name}{words}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Children one after another, escaped where they are text."""
    return Markup("".join(_text(child) for child in children))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int | float):
        return html.escape(str(child))
    return join(child)


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'

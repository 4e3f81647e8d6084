"""robots.txt by the examples of RFC 9309 and by what sites really write."""

from __future__ import annotations

import pytest

from ingest.robots import LIMIT, matches, parse


@pytest.mark.parametrize(
    ("text", "path", "rule"),
    [
        ("", "/x", None),
        ("User-agent: *\nDisallow: /", "/x", "/"),
        ("User-agent: *\nDisallow:", "/x", None),
        ("Disallow: /", "/x", None),
        ("User-agent: *\nDisallow: /\nUser-agent: pairmill\nAllow: /", "/x", None),
        ("User-agent: *\nAllow: /\n\nUser-agent: other\nUser-Agent: PairMill/1.0\n\nDisallow: /a", "/a", "/a"),
        (
            "user-agent: pairmill\ndisallow: /a\nuser-agent: x\ndisallow: /\nuser-agent: pairmill\ndisallow: /b",
            "/b/c",
            "/b",
        ),
        ("User-agent: pairmillbot\nDisallow: /", "/x", None),
        ("User-agent: *\nDisallow: /a\nAllow: /a/b", "/a/b/c.jpg", None),
        ("User-agent: *\nAllow: /a/b\nDisallow: /a", "/a/c.jpg", "/a"),
        ("User-agent: *\nDisallow: /a\nAllow: /a", "/a", None),
        ("User-agent: *\nDisallow: /*.jpg$", "/x/y.jpg", "/*.jpg$"),
        ("User-agent: *\nDisallow: /*.jpg$", "/x/y.jpg?size=2", None),
        ("User-agent: *\nDisallow: /x?id=", "/x?id=7", "/x?id="),
        ("User-agent: *\nDisallow: /ä", "/%c3%a4/1", "/%C3%A4"),
        ("User-agent: *\nDisallow: /%61", "/abc", "/a"),
        ("User-agent: *\nDisallow: /a%2Fb", "/a/b", None),
        ("\ufeffUser-agent: * # all\r\nDisallow: /a # because\rSitemap: x", "/a", "/a"),
        ("User-agent: *\nCrawl-delay: 5\nDisallow: /a\nnonsense\n: :\n", "/a", "/a"),
        ("User-agent: *\nDisallow: /", "/robots.txt", None),
    ],
)
def test_who_may_read_what(text: str, path: str, rule: str | None) -> None:
    assert parse(text.encode(), "pairmill").refusal(path) == (rule and f"Disallow: {rule}")


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("/a*b*c", "/a-b-c-d", True), ("/a*b$", "/a-b-b", True), ("/ab*b$", "/ab", False), ("/a$", "/ab", False),
        ("*", "/any", True), ("$", "/a", False), ("/a*", "/a", True), ("/a**b", "/ab", True), ("/*$", "/a", True),
    ],
)  # fmt: skip
def test_wildcards(pattern: str, path: str, fits: bool) -> None:
    assert matches(pattern, path) == fits


def test_hostile_files_cost_little() -> None:
    rules = parse(b"User-agent: *\nDisallow: /" + b"*a" * 2000 + b"$\n" + b"\xff\0" * LIMIT, "pairmill")
    assert rules.refusal("/" + "a" * 1999) is None
    assert parse(b"User-agent: *\n" + b"#" * LIMIT + b"\nDisallow: /", "pairmill").refusal("/x") is None

"""Captions are cleaned without losing what people wrote, and their language is told."""

from __future__ import annotations

import pytest

from ingest.captions import clean, languages


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("A red dog, 5 km away!", "A red dog, 5 km away!"),
        ("  two\t\twords \n here ", "two words here"),
        ("Fish &amp; chips", "Fish & chips"),
        ("Fish &amp;amp; chips", "Fish & chips"),
        ("caf\u00c3\u00a9", "café"),
        ("nul\x00 and bell\x07", "nul and bell"),
        ("\u202areversed\u202e text\ufeff", "reversed text"),
        ("half \ud83d a pair", "half a pair"),
        ("family 👨\u200d👩\u200d👧 stays", "family 👨\u200d👩\u200d👧 stays"),
        ("क्\u200dष 星", "क्\u200dष 星"),
        ("&nbsp;\u00a0", ""),
        ("", ""),
    ],
)
def test_clean(raw: str, cleaned: str) -> None:
    assert clean(raw) == cleaned
    assert clean(clean(raw)) == cleaned


def test_languages() -> None:
    captions = [
        "a photograph of a dog on the beach in summer", "ein Hund läuft über die grüne Wiese hinter dem Haus",
        "un chien court sur la plage avec une balle rouge", "一只狗在海滩上奔跑", "", "12 345 !?",
    ]  # fmt: skip
    assert languages(captions) == ["en", "de", "fr", "zh", None, None]


def test_a_whole_page_as_a_caption_is_cut_and_costs_little() -> None:
    page = "caf\u00c3\u00a9 &amp;amp; " * 60_000
    text = clean(page)
    assert text.startswith("café & café &") and len(text) <= 10_000
    assert languages(["x" * 2_000_000]) != []

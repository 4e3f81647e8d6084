"""CLIP's tokens. The expected numbers are those of open_clip's own tokenizer."""

from __future__ import annotations

import gzip
import html
import os
import sys
from pathlib import Path
from random import Random

import ftfy
import numpy as np
import pytest

from bench.peers import ready
from core.errors import ConfigError, HardwareError
from train import tokenizer as module
from train.tokenizer import END, START, Tokenizer, clean, load_bpe


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens between the markers."""
    row = tokenizer.encode([text])[0].tolist()
    assert row[0] == START
    end = row.index(END)
    assert set(row[end + 1 :]) <= {0}
    return row[1:end]


def test_known_tokens_and_layout(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(["a photo of a cat", ""])
    assert tokens.dtype == np.int32
    assert tokens.shape == (2, 77)
    assert tokens[0, :8].tolist() == [49406, 320, 1125, 539, 320, 2368, 49407, 0]
    assert tokens[1, :3].tolist() == [49406, 49407, 0]
    assert tokenizer.encode([]).shape == (0, 77)


@pytest.mark.parametrize("context", [3, 8, 77])
def test_long_texts_keep_their_end_marker(tokenizer: Tokenizer, context: int) -> None:
    tokens = tokenizer.encode(["x " * 100], context)
    assert tokens.shape == (1, context)
    assert tokens[0].tolist() == [START, *[343] * (context - 2), END]


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("A  Photo\tof\n a CAT ", "a photo of a cat"),
        ("fish &amp; chips", "fish & chips"),
        ("fish &amp;amp; chips", "fish & chips"),
        ("&lt;b&gt;", "<b>"),
        ("schÃ¶n", "schön"),
        ("“quoted”", '"quoted"'),
        ("a\u00a0b\u2003c", "a b c"),
    ],
)
def test_cleaning_makes_these_equal(tokenizer: Tokenizer, text: str, same_as: str) -> None:
    assert clean(text) == same_as
    assert ids(tokenizer, text) == ids(tokenizer, same_as)


def test_what_is_not_repaired_needs_no_repair() -> None:
    """What `clean` skips would have changed nothing: every printable character, beside every other, in runs."""
    draw = Random(0)
    plain = [chr(c) for c in range(32, 127) if chr(c) != "&"]
    for _ in range(400):
        text = "".join(draw.choices(plain, k=60)) + draw.choice(plain) * 4
        assert clean(text) == " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()).lower()
    letters = [c for c in map(chr, range(0xA1, 0x2FFF)) if c.isprintable()] + [chr(c) for c in range(0xF900, 0xFFEF)]
    for _ in range(3000):  # letters of all scripts, among them those that are rewritten
        text = "a" + "".join(draw.choices(letters, k=draw.randint(1, 4))) + draw.choice(["", " b", "Ã©"])
        assert clean(text) == " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()).lower(), ascii(text)
    assert clean("a\x1b[36mb") == "ab"  # terminal colours are no printable text, and are repaired


def test_emoji_numbers_and_other_scripts(tokenizer: Tokenizer) -> None:
    assert ids(tokenizer, "🐈") == [2074, 486]
    assert len(ids(tokenizer, "1234")) == 4  # digits stand alone
    assert ids(tokenizer, "日本語") != ids(tokenizer, "中文")
    assert ids(tokenizer, "don't") == [847, 713]


def test_marker_spelt_out_is_the_marker(tokenizer: Tokenizer) -> None:
    """As in the original: whoever writes it cuts their own caption."""
    assert tokenizer.encode(["a <end_of_text> b"])[0, :6].tolist() == [START, 320, END, 321, END, 0]


def test_fingerprint_does_not_name_the_backend(tokenizer: Tokenizer) -> None:
    assert tokenizer.backend in ("instant", "tokenizers")
    assert tokenizer.backend not in tokenizer.fingerprint


def test_wrong_settings_are_sentences(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="auto, instant or tokenizers"):
        Tokenizer("sentencepiece")
    with pytest.raises(ConfigError, match="at least 3"):
        tokenizer.encode(["x"], 2)
    monkeypatch.setitem(sys.modules, "instant_clip_tokenizer", None)
    monkeypatch.setattr(module, "find_vocabulary", lambda: None)
    with pytest.raises(HardwareError, match="pip install"):
        Tokenizer()


def write_vocabulary(folder: Path) -> Path:
    merges = ["h e", "l l", "he ll", "hell o</w>", "c a", "ca t</w>"]
    path = folder / module.VOCABULARY
    path.write_bytes(gzip.compress("\n".join(["#version: 0.2", *merges, ""]).encode()))
    return path


def test_fallback_merges_as_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of six merges in the real file's format: ids are 256 bytes, 256 word ends, then the merges."""
    monkeypatch.setattr(module, "MERGES", 6)
    inner = load_bpe(write_vocabulary(tmp_path))
    assert inner.encode("hello cat").ids == [512 + 3, 512 + 5]
    assert inner.encode("hell").ids == [512 + 0, ord("l") - 33, 256 + ord("l") - 33]
    assert inner.encode("9 9").ids == [256 + ord("9") - 33] * 2


def test_fallback_finds_the_file_inside_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "open_clip"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    path = write_vocabulary(package)
    monkeypatch.setattr(module, "MERGES", 6)
    monkeypatch.syspath_prepend(tmp_path)
    assert module.find_vocabulary() == path
    tokens = Tokenizer("tokenizers").encode(["Hello  CAT", "", "cat " * 9], 5)
    assert tokens.tolist() == [[START, 515, 517, END, 0], [START, END, 0, 0, 0], [START, 517, 517, 517, END]]


def test_both_backends_agree_on_words_of_all_kinds(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the vocabulary that `python -m bench.peers open_clip` brings."""
    python = ready("open_clip")
    if python is None:
        pytest.skip("needs the side environment open_clip")
    monkeypatch.setattr(sys, "path", [*sys.path, str(next(python.parent.parent.glob("lib/python*/site-packages")))])
    draw = Random(1)
    letters = "abcdefghij ,.'!-019&;<>äöüßéñçłşığ日本語中文한국어русскийελ\u0301🐈👩‍👩‍👧🇩🇪ﬁ½²™\u00a0\u2003\u200b\ufeff"
    texts = ["".join(draw.choices(letters, k=draw.randint(0, 80))) for _ in range(2000)]
    texts += ["don't we'll I'M they'Ve", "<start_of_text> x", "a" * 500, "x " * 200, "&amp;lt;b&amp;gt;"]
    assert np.array_equal(tokenizer.encode(texts), Tokenizer("tokenizers").encode(texts))


@pytest.mark.realdata
def test_both_backends_agree_on_real_captions(tokenizer: Tokenizer) -> None:
    folder = os.environ.get("PAIRMILL_REAL_DATA")
    if not folder or module.find_vocabulary() is None:
        pytest.skip("needs PAIRMILL_REAL_DATA and an installed vocabulary")
    with gzip.open(Path(folder) / "alttexts.tsv.gz", "rt", encoding="utf-8") as file:
        texts = [line.split("\t")[0] for line in file][1::20]
    assert np.array_equal(tokenizer.encode(texts), Tokenizer("tokenizers").encode(texts))

"""CLIP's byte-pair tokens, the same numbers as open_clip's.

Captions are cleaned first (mojibake repaired, HTML entities decoded twice, whitespace collapsed, lower case), then
encoded by instant-clip-tokenizer where it is installed (about twenty times the reference's speed), otherwise by the
`tokenizers` package with the vocabulary file of an installed open_clip_torch, clip-anytorch or openai-clip.
"""

from __future__ import annotations

import gzip
import html
import importlib.util
import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import ftfy

from core.errors import ConfigError, HardwareError

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer as FastTokenizer

START = 49406
END = 49407
CONTEXT = 77
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
MERGES = 49152 - 256 - 2

# CLIP's word pattern; texts are in lower case already.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class Encoder(Protocol):
    """Cleaned texts -> int32 (N, context): start marker, tokens, end marker, zeros; cut before the end marker."""

    def __call__(self, texts: list[str], context: int) -> np.ndarray: ...


# Letters that ftfy writes otherwise (quotation marks, ligatures, forms of full and half width), and the one it drops.
_REWRITTEN = re.compile(
    "[\u02bc\u2018-\u201f\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\ufb00-\ufb06\uff01-\uffef\ufffc]"
)


def _sound(text: str) -> bool:
    """Whether `clean` has nothing to repair or decode: seven of ten texts by their ASCII, most others by ftfy's first look."""
    if not text.isprintable() or "&" in text:
        return False
    if text.isascii():
        return True
    return not _REWRITTEN.search(text) and unicodedata.is_normalized("NFC", text) and not ftfy.is_bad(text)


def clean(text: str) -> str:
    """The text whose tokens open_clip takes."""
    if _sound(text):
        return " ".join(text.split()).lower()
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


class Tokenizer:
    """Texts to CLIP tokens. `backend` is "auto", "instant" or "tokenizers".

    HardwareError when no backend is installed.
    """

    def __init__(self, backend: str = "auto") -> None:
        makers = {"instant": _instant_encoder, "tokenizers": _fast_encoder}
        if backend != "auto" and backend not in makers:
            raise ConfigError(f"tokenizer backend must be auto, instant or tokenizers; found {backend!r}.")
        names = list(makers) if backend == "auto" else [backend]
        found = [(name, encoder) for name in names if (encoder := makers[name]()) is not None]
        if not found:
            raise HardwareError(
                "No CLIP vocabulary is installed: expected the package instant-clip-tokenizer, or open_clip_torch, "
                "clip-anytorch or openai-clip beside tokenizers; pip install one of them."
            )
        self.backend, self._encode = found[0]

    @property
    def fingerprint(self) -> str:
        """Names the tokens' meaning, for checkpoints: equal strings give equal tokens, whichever backend made them."""
        return "clip-bpe-49408 clean=ftfy,html2,space,lower v1"

    def encode(self, texts: list[str], context: int = CONTEXT) -> np.ndarray:
        """int32 (N, context): start marker, tokens, end marker, zeros. Long texts are cut before the end marker."""
        if context < 3:
            raise ConfigError(f"context must hold both markers and a token, so at least 3; found {context}.")
        return self._encode([clean(text) for text in texts], context)


def _instant_encoder() -> Encoder | None:
    try:
        import instant_clip_tokenizer
    except ImportError:
        return None
    import numpy as np

    inner = instant_clip_tokenizer.Tokenizer()

    def encode(texts: list[str], context: int) -> np.ndarray:
        if not texts:
            return np.zeros((0, context), np.int32)
        return inner.tokenize_batch(texts, context_length=context).astype(np.int32)

    return encode


def _fast_encoder() -> Encoder | None:
    path = find_vocabulary()
    if path is None:
        return None
    import numpy as np

    inner = load_bpe(path)

    def encode(texts: list[str], context: int) -> np.ndarray:
        out = np.zeros((len(texts), context), np.int32)
        for row, item in zip(out, inner.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            ids = item.ids[: context - 2]
            row[0] = START
            row[1 : 1 + len(ids)] = ids
            row[1 + len(ids)] = END
        return out

    return encode


def find_vocabulary() -> Path | None:
    """The merges file inside an installed package that carries it."""
    for package in ("open_clip", "clip"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            path = Path(folder) / VOCABULARY
            if path.is_file():
                return path
    return None


def load_bpe(path: Path) -> FastTokenizer:
    """A `tokenizers` encoder from CLIP's gzipped merges file."""
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer

    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")[1 : MERGES + 1]
    merges = [(first, second) for first, second in (line.split() for line in lines)]
    letters = _byte_letters()
    words = [*letters, *(letter + "</w>" for letter in letters), *(a + b for a, b in merges)]
    words += ["<start_of_text>", "<end_of_text>"]
    bpe = models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges, end_of_word_suffix="</w>")
    inner = FastTokenizer(bpe)
    inner.add_special_tokens(words[-2:])  # spelt out in a caption they are markers, as in the original
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return inner


def _byte_letters() -> list[str]:
    """The 256 printable letters that stand for bytes, in the order of their token ids (printable bytes come first)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = 256 - len(printable)
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(others)]

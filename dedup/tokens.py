"""Captions as sets of word hashes, on Arrow buffers.

The rule of what a token is, stated once: text is folded (NFKC, case), everything that is punctuation, a symbol or a
space separates words, and a run of a script that is written without spaces (Chinese characters, kana, Thai, Lao, Khmer,
Burmese) becomes its overlapping pairs of characters, because the whole run as one word would only ever match itself.

N captions, n of them at a time, W words of the longest of those.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterator

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_SPACELESS_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # kana
    (0x3400, 0x4DBF),  # Chinese characters, extension A
    (0x4E00, 0x9FFF),  # Chinese characters
    (0xF900, 0xFAFF),  # compatibility characters
    (0x20000, 0x323AF),  # extensions B to H
)
_AT_ONCE = 1 << 16  # table elements worked on at a time: they stay in the second-level cache
_CAPTIONS = 1 << 14  # and captions: memory just used is used again
_SEPARATOR, _SPACELESS = 1, 2  # kinds of characters; 0 is any other
_KEY_BITS, _STEPS = 58, 63  # of a set key: those of the words; sizes told apart by the others
_BLOCK = 8  # bytes of a word hashed at a time
_FIRST_BYTES = np.array([(1 << (8 * n)) - 1 for n in range(_BLOCK + 1)], np.uint64)


@dataclass(frozen=True)
class Words:
    """Word hashes, never 0, in order and with repeats: caption i has `flat[offsets[i]:offsets[i + 1]]`."""

    flat: U64
    offsets: I64

    @property
    def lengths(self) -> I64:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Sets:
    """S token sets as hashes of 32 bits: set s is `flat[starts[s]:starts[s] + sizes[s]]`; `flat` has at least one element.

    Two different words of a compared pair pass for the same once in four thousand million comparisons.
    """

    flat: U32
    starts: I64
    sizes: I64


def segments(flat: npt.NDArray[Any], starts: I64, sizes: I64) -> tuple[npt.NDArray[Any], I64]:
    """The segments `flat[starts[i]:starts[i] + sizes[i]]` one after the other, and their offsets."""
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    return flat[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)], offsets


def tokenise(captions: pa.Array) -> Words:
    """Words of Arrow strings; a null is an empty caption."""
    text, bounds = _folded(captions)
    starts, ends = _word_bounds(text, bounds)
    return Words(_hashes(text, starts, ends - starts), np.searchsorted(starts, bounds))


def as_sets(captions: pa.Array) -> tuple[Sets, U64, U64]:
    """(sets, set keys [N], caption keys [N]) of Arrow strings.

    Equal sets have equal set keys, and smaller sets smaller ones; captions of the same words in the same order have equal
    caption keys; 0 is for no word. At 10^8 sets the chance that any two of them share a key is 1 in 600.
    """
    made = [_as_sets(captions.slice(start, _CAPTIONS)) for start in range(0, max(len(captions), 1), _CAPTIONS)]
    sets, set_keys, caption_keys = zip(*made, strict=True)
    before = np.cumsum([0, *(len(part.flat) for part in sets[:-1])])
    starts = np.concatenate([part.starts + filled for part, filled in zip(sets, before, strict=True)])
    whole = Sets(np.concatenate([part.flat for part in sets]), starts, np.concatenate([part.sizes for part in sets]))
    return whole, np.concatenate(set_keys), np.concatenate(caption_keys)


def _as_sets(captions: pa.Array) -> tuple[Sets, U64, U64]:
    words = tokenise(captions)
    count = len(words.lengths)
    set_keys, caption_keys = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
    starts, sizes = np.zeros(count, np.int64), np.zeros(count, np.int64)
    flats, filled = [], 0
    for rows, width in alike(words.lengths):
        table_nW = _table(words, rows, width)
        caption_keys[rows] = table_nW @ _places(width)
        table_nW.sort(axis=1)
        table_nW[:, 1:][table_nW[:, 1:] == table_nW[:, :-1]] = 0
        used_nW = table_nW != 0
        sizes[rows] = counts(used_nW)
        # sets in order of their keys lie in order of their sizes, as kernels on like sizes want them
        step = np.minimum(sizes[rows], _STEPS).astype(np.uint64) << np.uint64(_KEY_BITS)
        set_keys[rows] = ((table_nW @ np.ones(width, np.uint64)) >> np.uint64(64 - _KEY_BITS)) | step
        starts[rows] = filled + np.cumsum(sizes[rows]) - sizes[rows]
        flats.append(np.maximum(table_nW[used_nW].astype(np.uint32), 1))
        filled += len(flats[-1])
    return Sets(np.concatenate([*flats, np.zeros(1, np.uint32)]), starts, sizes), set_keys, caption_keys


def alike(sizes: I64) -> Iterator[tuple[I64, int]]:
    """Row numbers of similar size with the width of a table that holds them; rows of size 0 are left out.

    Widths go up in steps of an eighth at most, so that long captions do not each make a table of their own.
    """
    steps = 2 ** np.maximum(np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64) - 3, 0)
    widths = -(-sizes // steps) * steps
    order = np.argsort(widths.astype(np.min_scalar_type(widths.max(initial=0))), kind="stable")  # short types: by radix
    begin = 0
    for width, count in enumerate(np.bincount(widths).tolist()):
        end = begin + count
        step = max(1, _AT_ONCE // max(width, 1))
        for start in range(begin, end, step) if width else ():
            yield order[start : min(start + step, end)], width
        begin = end


def counts(mask_nW: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """How many are set in each row: a product, which takes a third of a sum along short rows."""
    return np.matmul(mask_nW.view(np.uint8), np.ones(mask_nW.shape[1], np.uint32), dtype=np.uint32)


def _table(words: Words, rows: I64, width: int) -> U64:
    """The words of captions `rows`, [n, W], with zeros where a caption has fewer."""
    at_nW = words.offsets[rows][:, None] + np.arange(width)
    used_nW = at_nW < words.offsets[rows + 1][:, None]
    return np.where(used_nW, words.flat[np.minimum(at_nW, len(words.flat) - 1)], np.uint64(0))


def _places(width: int) -> U64:
    """An odd random number for each place in a caption."""
    return _mixed(np.arange(1, width + 1, dtype=np.uint64)) | np.uint64(1)


def _word_bounds(text: U8, bounds: I64) -> tuple[I64, I64]:
    """Where words start and end; `bounds` are of captions, which end words even where no space does."""
    inside = text[: bounds[-1]] != ord(" ")
    starts, ends = inside.copy(), inside.copy()
    starts[1:] &= ~inside[:-1]
    ends[:-1] &= ~inside[1:]
    filled = bounds[:-1] < bounds[1:]
    first, last = bounds[:-1][filled], bounds[1:][filled] - 1
    starts[first], ends[last] = inside[first], inside[last]
    return np.flatnonzero(starts), np.flatnonzero(ends) + 1


def _hashes(text: U8, starts: I64, lengths: I64) -> U64:
    """A hash of each word, from all words' first eight bytes, then the longer words' next ones, and so on.

    Different words of up to eight bytes never collide, since a block is mixed by a bijection. `text` has at least seven
    bytes more than the words.
    """
    blocks = np.ndarray(max(len(text) - _BLOCK + 1, 0), np.uint64, text, 0, (1,))  # one at every byte
    hashes = _mixed(blocks[starts] & _FIRST_BYTES[np.minimum(lengths, _BLOCK)])
    longer, done = np.flatnonzero(lengths > _BLOCK), _BLOCK
    while len(longer):
        block = blocks[starts[longer] + done] & _FIRST_BYTES[np.minimum(lengths[longer] - done, _BLOCK)]
        hashes[longer] = _mixed(hashes[longer] + block)
        done += _BLOCK
        longer = longer[lengths[longer] > done]
    return hashes


def _mixed(values: U64) -> U64:
    """A fixed bijection of uint64 that spreads every input bit and keeps 0 (the finisher of SplitMix64)."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _folded(captions: pa.Array) -> tuple[U8, I64]:
    """Folded text as UTF-8 bytes, eight zeros behind them, and the bounds [N + 1] of its captions."""
    captions = pc.fill_null(captions.cast(pa.large_string()), "")
    plain = pc.string_is_ascii(captions)
    if not pc.all(plain, min_count=0).as_py():
        other = fold_all(captions.filter(pc.invert(plain)).to_pylist())
        captions = pc.replace_with_mask(captions, pc.invert(plain), pa.array(other, pa.large_string()))
    captions = pa.concat_arrays([captions])
    _, offsets, data = captions.buffers()
    start = captions.offset
    bounds = (
        np.frombuffer(offsets, np.int64)[start : start + len(captions) + 1] if len(captions) else np.zeros(1, np.int64)
    )
    text = memoryview(data)[bounds[0] : bounds[-1]] if data is not None and len(captions) else b""
    # one pass over the bytes of all captions: twenty times faster than a call a caption
    return np.frombuffer(bytes(text).translate(_ascii_table()) + bytes(_BLOCK), np.uint8), bounds - bounds[0]


def fold(text: str) -> str:
    """One caption by the rule at the head of this file, words separated by single spaces."""
    return " ".join(fold_all([text])[0].split())


def fold_all(texts: list[str]) -> list[str]:
    """Captions by the rule at the head of this file, words separated by spaces. All of them as one text, since a call
    costs more than a caption."""
    joined = "\n".join(text.replace("\n", " ") for text in texts)
    joined = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", joined).casefold())
    codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
    kinds = _kinds(0x10000 if codes.max(initial=0) < 0x10000 else 0x110000)[codes]
    separated = np.where(kinds == _SEPARATOR, np.uint32(ord(" ")), codes)
    return _paired(separated, kinds == _SPACELESS).tobytes().decode("utf-32-le").split("\n")


def _paired(codes: U32, spaceless: npt.NDArray[np.bool_]) -> U32:
    """Each run of spaceless characters as its overlapping pairs (a run of one as itself), with spaces around."""
    if not spaceless.any():
        return codes
    before, after = np.zeros(len(codes), bool), np.zeros(len(codes), bool)
    before[1:], after[:-1] = spaceless[:-1], spaceless[1:]
    first, last = spaceless & ~before, spaceless & ~after
    # written for each character: a space that opens its run, itself, its follower, and a space behind that pair
    follows, itself, closes = spaceless & after, ~last | first, spaceless & (after | first)
    sizes = first.astype(np.int64) + itself + follows + closes
    ends = np.cumsum(sizes)
    result = np.full(int(ends[-1]), ord(" "), np.uint32)
    result[(ends - closes - follows - 1)[itself]] = codes[itself]
    result[(ends - closes - 1)[follows]] = codes[1:][follows[:-1]]
    return result


@functools.cache
def _ascii_table() -> bytes:
    table = bytearray(range(256))
    for code in range(128):
        character = chr(code)
        table[code] = ord(character.lower()) if character.isalnum() else ord(" ")
    return bytes(table)


@functools.cache
def _kinds(limit: int) -> U8:
    """What each character below `limit` is. The line feed separates captions; marks are no separators: in Indic scripts
    they are vowels inside a word."""
    separates = (unicodedata.category(chr(code))[0] in "PSZC" for code in range(limit))
    kinds = np.fromiter(separates, np.uint8, limit)
    kinds *= _SEPARATOR
    kinds[ord("\n")] = 0
    for low, high in _SPACELESS_RANGES:
        inside = kinds[low : high + 1]
        inside[inside == 0] = _SPACELESS
    return kinds

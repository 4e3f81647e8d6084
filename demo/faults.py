"""The files of the demo world as bytes, and what goes wrong in it: the planted kinds and how many rows of each.

A row of the URL list carries its kind in the column `planted`; the kind is also the path it is served under
(`/fault/KIND/NAME`), so a log line of the server says what was asked for.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from core.schema import Outcome

if TYPE_CHECKING:
    from PIL import Image

    from demo.world import Scene, Studio

GOOD = "good"


@dataclass(frozen=True)
class Row:
    """One row of the URL list. `path` is below the server's base URL, or a whole (bad) URL that goes out as it is.

    planted: a kind of `KINDS`, or "good". twin: the path whose picture or caption the row repeats, else "".
    shows: the combinations in the picture.
    """

    path: str
    caption: str
    planted: str
    twin: str = ""
    shows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """One kind of planted row.

    share: rows of this kind per good picture. least: rows in the smallest world. outcomes: what a careful ingest may
    make of such a row. repeats: the row repeats the picture or the caption of another row, named in `twin`.
    """

    name: str
    share: float
    least: int
    outcomes: tuple[Outcome, ...] = (Outcome.OK,)
    repeats: bool = False


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("404", 0.010, 2, (Outcome.HTTP_4XX,)),
        Kind("410", 0.003, 2, (Outcome.HTTP_4XX,)),
        Kind("500", 0.004, 2, (Outcome.HTTP_5XX,)),
        Kind("503_once", 0.005, 2),
        # few, because an honest client pauses the whole host for each of them
        Kind("429_once", 0.001, 2),
        Kind("slow", 0.001, 2, (Outcome.TOO_SLOW, Outcome.TIMEOUT)),
        Kind("cut", 0.004, 2, (Outcome.TRUNCATED,)),
        Kind("truncated", 0.007, 2, (Outcome.TRUNCATED, Outcome.CORRUPT)),
        Kind("html", 0.010, 2, (Outcome.NOT_IMAGE,)),
        Kind("empty", 0.003, 2, (Outcome.NOT_IMAGE, Outcome.TRUNCATED)),
        Kind("redirect", 0.010, 2),
        Kind("loop", 0.002, 2, (Outcome.HTTP_4XX, Outcome.BAD_URL, Outcome.CONNECT)),
        Kind("private", 0.002, 2, (Outcome.BLOCKED_ADDRESS,)),
        Kind("bad_url", 0.004, 2, (Outcome.BAD_URL,)),
        Kind("exact", 0.015, 3, repeats=True),
        Kind("reencoded", 0.020, 3, repeats=True),
        Kind("mirrored", 0.010, 2, repeats=True),
        Kind("near_caption", 0.020, 4, repeats=True),
        Kind("same_caption", 0.012, 12, repeats=True),
        Kind("captions", 0.020, 3, repeats=True),
        Kind("bomb", 0.001, 2, (Outcome.BOMB,)),
        Kind("tiny", 0.007, 2, (Outcome.TOO_SMALL, Outcome.OK)),
        Kind("aspect", 0.004, 2, (Outcome.BAD_ASPECT, Outcome.OK)),
        Kind("no_caption", 0.006, 2, (Outcome.EMPTY_CAPTION,)),
        Kind("corrupt", 0.007, 2, (Outcome.CORRUPT,)),
        Kind("hostile", 0.002, 6),
    )
}

BAD_URLS = (
    "not a url",
    "http://",
    "ftp://127.0.0.1/star.jpg",
    "file:///etc/hostname",
    "data:image/gif;base64,R0lGODlhAQABAAAAACw=",
    "http://[::1/star.png",
    "javascript:alert(1)",
    "http://127.0.0.1:99999/star.webp",
)

# each is completed with what the picture shows; they must pass through list, database, shard and report unharmed
HOSTILE_CAPTIONS = (
    "<script>alert(1)</script> {}",
    "a \"quoted\" & 'single' {} </td><img src=x onerror=alert(1)>",
    "tab\there, {} and a back\\slash",
    "étoile ★ 星 🌟 {} – “déjà vu”",
    '=HYPERLINK("http://127.0.0.1/") {}; DROP TABLE pairs; --',
    "\u202ereversed\u202c {} %s {{}} ${{HOME}} 👩\u200d🚀",
)

PRIVATE_ADDRESS = "http://169.254.169.254/latest/meta-data/"
HTML_PAGE = b"<!doctype html><title>Not here</title><p>The picture you asked for has moved to a better place.</p>\n"


def planted_counts(pictures: int) -> dict[str, int]:
    """Rows of every planted kind in a world of `pictures` good ones."""
    return {kind.name: max(kind.least, round(kind.share * pictures)) for kind in KINDS.values()}


def truncate(body: bytes) -> bytes:
    """The first three fifths of a file: headers and part of the pixels, no end."""
    return body[: len(body) * 3 // 5]


def corrupt(body: bytes) -> bytes:
    """A JPEG or PNG whose header stands and whose pixels no decoder can read.

    In a JPEG the Huffman tables claim more codes than exist; damage to the scan alone would decode to grey without a
    word in many decoders. In a PNG the compressed stream is garbage.
    """
    jpeg = body.startswith(b"\xff\xd8")
    start, length = (body.index(b"\xff\xc4") + 5, 16) if jpeg else (body.index(b"IDAT") + 4, 64)
    return body[:start] + b"\xff" * length + body[start + length :]


def bomb(index: int) -> bytes:
    """A PNG of under 150 KB that claims hundreds of millions of pixels or more.

    Even indices hold all 20000 x 20000 of their (black, 1-bit) pixels; odd ones claim 60000 x 60000 and hold one row.
    """
    side, rows = (20_000, 20_000) if index % 2 == 0 else (60_000, 1)
    row = bytes(1 + side // 8)
    squeeze = zlib.compressobj(9)
    packed = b"".join(squeeze.compress(row) for _ in range(rows)) + squeeze.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encode(rng: Random, image: Image.Image, form: str = "") -> tuple[bytes, str]:
    """Bytes and file ending of a picture: mostly JPEG (some progressive, some turned by EXIF), PNG and WebP; or `form`."""
    form = form or rng.choices(("jpg", "png", "webp"), (80, 8, 12))[0]
    out = io.BytesIO()
    if form == "jpg":
        image, exif = _turned(image) if rng.random() < 0.05 else (image, b"")
        subsampling = rng.choice(("4:2:0", "4:2:0", "4:4:4"))
        progressive = rng.random() < 0.1
        image.save(
            out, "JPEG", quality=rng.randint(72, 95), subsampling=subsampling, progressive=progressive, exif=exif
        )
    elif form == "png":
        image.save(out, "PNG", compress_level=1)
    else:
        image.save(out, "WEBP", quality=rng.randint(75, 92), method=0)
    return out.getvalue(), form


def reencode(image: Image.Image, way: int, form: str) -> tuple[bytes, str]:
    """The same picture in other bytes: JPEG at quality 60, at half its size, or in a format other than `form`."""
    out = io.BytesIO()
    if way == 0:
        image.save(out, "JPEG", quality=60)
        return out.getvalue(), "jpg"
    if way == 1:
        image.reduce(2).save(out, "JPEG", quality=85)
        return out.getvalue(), "jpg"
    if form == "webp":
        image.save(out, "PNG", compress_level=1)
        return out.getvalue(), "png"
    image.save(out, "WEBP", quality=80, method=0)
    return out.getvalue(), "webp"


def _turned(image: Image.Image) -> tuple[Image.Image, bytes]:
    """The picture stored on its side, with the EXIF orientation that turns it up again."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    return image.transpose(Image.Transpose.ROTATE_90), exif.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# planting: one function makes one row


def plant(studio: Studio) -> list[Row]:
    """All planted rows of a world whose good pictures are drawn; writes the files that they need."""
    return [_MAKERS[name](studio, name, index) for name in KINDS for index in range(studio.counts[name])]


def _nothing(studio: Studio, kind: str, index: int) -> Row:
    """A row whose URL never gives a picture."""
    seen = studio.single(studio.rng(kind, index))
    caption = studio.phrases.new(studio.rng(kind, index), seen)
    return Row(f"/fault/{kind}/{kind}-{index:04d}.jpg", caption, kind)


def _bad_url(studio: Studio, kind: str, index: int) -> Row:
    return Row(BAD_URLS[index % len(BAD_URLS)], _nothing(studio, kind, index).caption, kind)


def _served(studio: Studio, kind: str, index: int) -> Row:
    """A picture of its own, which the server hands out in the kind's way."""
    rng = studio.rng(kind, index)
    seen = studio.single(rng)
    caption = studio.phrases.new(rng, seen)
    return _file(studio, kind, index, encode(rng, studio.draw(rng, seen)), caption, seen)


def _hostile(studio: Studio, kind: str, index: int) -> Row:
    row = _served(studio, kind, index)
    form = HOSTILE_CAPTIONS[index % len(HOSTILE_CAPTIONS)]
    return Row(row.path, form.format(row.caption), kind, "", row.shows)


def _no_caption(studio: Studio, kind: str, index: int) -> Row:
    row = _served(studio, kind, index)
    return Row(row.path, "  " if index % 2 else "", kind, "", row.shows)


def _broken(studio: Studio, kind: str, index: int) -> Row:
    """A picture of its own, damaged or of a size that no one can use."""
    rng = studio.rng(kind, index)
    seen = studio.single(rng)
    caption = studio.phrases.new(rng, seen)
    image = studio.draw(rng, seen)
    if kind == "truncated":
        body = truncate(encode(rng, image, "jpg")[0]), "jpg"
    elif kind == "corrupt":
        form = ("jpg", "png")[index % 2]
        body = corrupt(encode(rng, image, form)[0]), form
    elif kind == "bomb":
        body = bomb(index), "png"
    elif kind == "tiny":
        side = 1 if index == 0 else rng.randint(8, 31)
        body = encode(rng, image.resize((side, side)), ("jpg", "png")[index % 2])
    else:
        body = encode(rng, image.resize((640, 36) if index % 2 else (36, 640)), "jpg")
    return _file(studio, kind, index, body, caption, seen)


def _copy(studio: Studio, kind: str, index: int) -> Row:
    """A good picture once more, under another URL: the same bytes, other bytes, or its mirror image.

    Exact copies keep the caption, of the others every second one (mirrored: those whose place stays the same).
    """
    from PIL import Image, ImageOps

    rng = studio.rng(kind, index)
    twin, seen = _good(studio, kind, index)
    source = studio.folder / "pictures" / twin.path.removeprefix("/i/")
    if kind == "exact":
        body = source.read_bytes(), source.suffix[1:]
        return _file(studio, kind, index, body, twin.caption, seen, twin)
    with Image.open(source) as stored:
        image = ImageOps.exif_transpose(stored).convert("RGB")
    if kind == "mirrored":
        original, seen = seen, seen.mirrored()
        body = encode(rng, ImageOps.mirror(image))
        same = seen == original
    else:
        body = reencode(image, index // 2 % 3, source.suffix[1:])
        same = index % 2 == 0
    caption = twin.caption if same else studio.phrases.new(rng, seen)
    return _file(studio, kind, index, body, caption, seen, twin)


def _second_caption(studio: Studio, kind: str, index: int) -> Row:
    """Another caption of a good picture, under the same URL."""
    twin, seen = _good(studio, kind, index)
    return Row(twin.path, studio.phrases.new(studio.rng(kind, index), seen), kind, twin.path, twin.shows)


def _near_caption(studio: Studio, kind: str, index: int) -> Row:
    """Another picture of what a good picture shows, whose caption differs from that one's by one word."""
    rng = studio.rng(kind, index)
    if index % 2:
        # one word more is a fifth of four words, so that shorter captions would not be near-duplicates any more
        roomy = (found for found in reversed(studio.good) if len(set(found[0].caption.split())) > 4)
        twin, seen = next(islice(roomy, index // 2, None))
        caption = f"{twin.caption} {rng.choice(_WORDS_TO_ADD)}"
    else:
        twin, seen = studio.good[index // 2 % len(studio.good)]
        caption = twin.caption.replace("showing", rng.choice(_WORDS_TO_CHANGE))
    return _file(studio, kind, index, encode(rng, studio.draw(rng, seen)), caption, seen, twin)


def _same_caption(studio: Studio, kind: str, index: int) -> Row:
    """One of at least a dozen pictures with one caption."""
    groups = max(1, studio.counts[kind] // 12)
    seen = studio.single(studio.rng(f"{kind} group", index % groups))
    rng = studio.rng(kind, index)
    thing = seen.things[0]
    again = studio.single(rng, (thing.colour, thing.shape))
    caption = f"{seen.shows[0]} clipart"
    return _file(studio, kind, index, encode(rng, studio.draw(rng, again)), caption, again)


def _good(studio: Studio, kind: str, index: int) -> tuple[Row, Scene]:
    """The good row that a planted one repeats: every kind has its own stretch of the list, so that no row is
    repeated in two ways; the first stretch is that of the long captions."""
    start = studio.counts["near_caption"]
    for name, kind_of in KINDS.items():
        if name == kind:
            break
        start += studio.counts[name] if kind_of.repeats else 0
    return studio.good[(start + index) % len(studio.good)]


def _file(
    studio: Studio, kind: str, index: int, body: tuple[bytes, str], caption: str, seen: Scene, twin: Row | None = None
) -> Row:
    name = studio.save(f"faults/{kind}", f"{kind}-{index:04d}", *body)
    return Row(f"/fault/{kind}/{name}", caption, kind, twin.path if twin else "", seen.shows)


_WORDS_TO_ADD = ("today", "again", "indeed", "maybe")
_WORDS_TO_CHANGE = ("with", "of", "containing")

_MAKERS: dict[str, Callable[[Studio, str, int], Row]] = {
    **dict.fromkeys(("404", "410", "500", "html", "empty", "loop", "private"), _nothing),
    **dict.fromkeys(("503_once", "429_once", "slow", "cut", "redirect"), _served),
    **dict.fromkeys(("truncated", "corrupt", "bomb", "tiny", "aspect"), _broken),
    **dict.fromkeys(("exact", "reencoded", "mirrored"), _copy),
    "bad_url": _bad_url,
    "hostile": _hostile,
    "no_caption": _no_caption,
    "captions": _second_caption,
    "near_caption": _near_caption,
    "same_caption": _same_caption,
}

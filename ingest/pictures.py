"""One body becomes one picture: checked, reduced, encoded and hashed, or refused with an outcome."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import zlib
from dataclasses import dataclass

from core.errors import ImageError
from core.schema import Outcome

HASH_SIDE = 256  # adopted pictures are hashed at this side, near what ingest stores, so that the two compare
MAX_ASPECT = 8.0  # longer side to the shorter; beyond it are banners and rules
LARGE = 8_000_000  # pixels of a picture of which a worker decodes only one at a time, for its memory's sake
_large = threading.Lock()
_ENDINGS = {"jpeg": "jpg", "tiff": "tif", "jpeg2000": "jp2"}


@dataclass(frozen=True)
class Rules:
    """What is stored and what is refused; the fields mean what they mean in `IngestConfig`."""

    size: int = HASH_SIDE
    quality: int = 90
    keep_original: bool = True
    min_side: int = 0


@dataclass
class Picture:
    """What is known of one body; `data` is what is to be stored, empty where `outcome` is not ok.

    received: bytes of the body.
    """

    outcome: Outcome
    detail: str | None = None
    received: int = 0
    sha256: str | None = None
    format: str | None = None
    width: int | None = None
    height: int | None = None
    stored_width: int | None = None
    stored_height: int | None = None
    stored_sha256: str | None = None
    stored_crc32: int | None = None
    image_hash: bytes | None = None
    image_hash_mirrored: bytes | None = None
    data: bytes = b""
    ending: str = "jpg"


def prepare(body: bytes, rules: Rules) -> Picture:
    """Check, decode, reduce, encode and hash one body. Never raises for anything its bytes can be."""
    picture = Picture(Outcome.OK, received=len(body), sha256=hashlib.sha256(body).hexdigest())
    try:
        _fill(picture, body, rules)
    except ImageError as error:
        picture.outcome, picture.detail, picture.data = error.outcome, error.detail, b""
    except Exception as error:  # the boundary of one row: whatever a codec does, the run goes on and the row says so
        picture.outcome, picture.detail, picture.data = Outcome.INTERNAL, f"{type(error).__name__}: {error}"[:200], b""
    return picture


def _fill(picture: Picture, body: bytes, rules: Rules) -> None:
    from core import imagehash, images

    header = images.read_header(body)
    picture.format, picture.width, picture.height = header.format, header.width, header.height
    check_size(header.width, header.height, rules)
    with _large if header.width * header.height > LARGE else contextlib.nullcontext():
        pixels = images.reduced(body, header, rules.size)
    picture.image_hash, picture.image_hash_mirrored = imagehash.image_hash(pixels)
    if rules.keep_original or images.fits_as_is(body, header, rules.size):
        picture.data, picture.stored_width, picture.stored_height = body, header.width, header.height
        picture.ending = _ENDINGS.get(header.format, header.format)
    else:
        picture.data = images.encode_jpeg(pixels, rules.quality)
        picture.stored_height, picture.stored_width = pixels.shape[:2]
    picture.stored_sha256 = picture.sha256 if picture.data is body else hashlib.sha256(picture.data).hexdigest()
    picture.stored_crc32 = zlib.crc32(picture.data)


def check_size(width: int, height: int, rules: Rules) -> None:
    """Refuse pictures that are too small or too long, by the header alone.

    Raises:
        ImageError: too_small or bad_aspect.
    """
    short, long = sorted((width, height))
    if rules.min_side and short < rules.min_side:
        raise ImageError(Outcome.TOO_SMALL, f"{width}x{height}")
    if long > MAX_ASPECT * short:
        raise ImageError(Outcome.BAD_ASPECT, f"{width}x{height}")

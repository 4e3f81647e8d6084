"""Pixels: upright, sRGB, whole or refused; bombs refused by their header; what is stored is what hardware decodes."""

from __future__ import annotations

import csv
import io
import os
import re
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from core import images
from core.errors import ImageError
from core.images import decode, encode_jpeg, fits_as_is, read_header, reduced, resize
from core.schema import Outcome

if TYPE_CHECKING:
    from core.images import Pixels

REAL = os.environ.get("PAIRMILL_REAL_DATA", "")


def gradient(width: int, height: int) -> Pixels:
    """Smooth, and different along both axes and in every channel."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return (np.stack([x, y, (x + y) / 2], -1) * 255).astype(np.uint8)


def saved(pixels: Pixels | Image.Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(out, form, **options)
    return out.getvalue()


def opened(body: bytes, **options: Any) -> Pixels:
    return decode(body, read_header(body), **options)


def refused(body: bytes) -> Outcome:
    with pytest.raises(ImageError) as error:
        opened(body)
    return error.value.outcome


def far(a: Pixels, b: Pixels) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(int) - b).mean())


# ---- every format gives the same picture -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "options"),
    [("JPEG", {"quality": 95, "subsampling": 0}), ("JPEG", {"quality": 95, "progressive": True}), ("PNG", {}),
     ("WEBP", {"quality": 95}), ("AVIF", {"quality": 90}), ("BMP", {}), ("TIFF", {"compression": "tiff_lzw"})],
)  # fmt: skip
def test_every_format_gives_the_same_picture(form: str, options: dict[str, Any]) -> None:
    body = saved(gradient(97, 64), form, **options)
    header = read_header(body)
    assert (header.format, header.width, header.height) == (form.lower(), 97, 64)
    assert header.progressive == bool(options.get("progressive"))
    pixels = decode(body, header)
    assert pixels.dtype == np.uint8 and pixels.flags["C_CONTIGUOUS"]
    assert far(pixels, gradient(97, 64)) < 3


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_pictures_are_turned_upright(orientation: int, form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossy: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 95},
        "WEBP": {"lossless": True},
        "AVIF": {"quality": 95, "speed": 10},
    }
    body = saved(gradient(60, 40), form, exif=exif, **lossy.get(form, {}))
    # not from the file, because Pillow turns some forms itself, and so both could be wrong in one way
    image = Image.fromarray(gradient(60, 40))
    image.getexif()[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(image))
    header = read_header(body)
    assert (header.width, header.height) == upright.shape[1::-1] == ((60, 40) if orientation < 5 else (40, 60))
    assert far(opened(body), upright) < 3


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16)[None, :].repeat(8, 0)
    pixels = opened(saved(Image.fromarray(ramp), "PNG"))
    assert np.array_equal(pixels[0, :, 0], np.arange(256))


def test_transparency_lies_on_white() -> None:
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[:2, :, 3] = 255  # black above, nothing below
    for form in ("PNG", "WEBP"):
        pixels = opened(saved(Image.fromarray(rgba), form, **({"lossless": True} if form == "WEBP" else {})))
        assert pixels[:2].max() == 0 and pixels[2:].min() == 255
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    assert opened(saved(palette, "PNG", transparency=1)).min() == 255
    assert opened(saved(palette, "GIF"))[0, 0].tolist() == [0, 0, 255]


def test_the_first_frame_stands_for_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    for form in ("GIF", "WEBP"):
        body = saved(frames[0], form, save_all=True, append_images=frames[1:])
        assert opened(body)[4, 4, 0] > 200


def test_grey_and_inks_become_rgb() -> None:
    assert far(opened(saved(Image.new("L", (9, 9), 77), "JPEG")), np.full((9, 9, 3), 77, np.uint8)) < 2
    assert far(opened(saved(Image.new("CMYK", (9, 9), (0, 0, 0, 255)), "JPEG")), np.zeros((9, 9, 3), np.uint8)) < 4


def gamma_profile(gamma: float) -> bytes:
    """An RGB profile with sRGB's primaries and another gamma, taken from LittleCMS's sRGB."""
    from PIL import ImageCms

    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = struct.unpack_from(">I", profile, 128)[0]
    for i in range(count):
        tag, offset, _ = struct.unpack_from(">4sII", profile, 132 + 12 * i)
        if tag in (b"rTRC", b"gTRC", b"bTRC"):
            profile[offset : offset + 16] = b"curv\0\0\0\0\0\0\0\1" + struct.pack(">H", round(gamma * 256)) + b"\0\0"
    return bytes(profile)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_profiles_are_applied_srgb_costs_nothing_and_damage_is_ignored(form: str) -> None:
    from PIL import ImageCms

    grey = np.full((8, 8, 3), 128, np.uint8)
    linear = opened(saved(grey, form, icc_profile=gamma_profile(1.0)))
    assert abs(int(linear[0, 0, 0]) - 188) <= 2  # half the light is 188 of 255 in sRGB
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile in (srgb, b"not a profile at all" * 10):
        assert abs(int(opened(saved(grey, form, icc_profile=profile))[0, 0, 0]) - 128) <= 1


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_no_cut_file_passes_for_a_picture(form: str) -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    body = saved(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), form)
    for share in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97):
        assert refused(body[: int(len(body) * share)]) in (Outcome.TRUNCATED, Outcome.CORRUPT)


def test_a_hole_in_the_data_is_not_filled_in() -> None:
    body = bytearray(
        saved(np.random.Generator(np.random.PCG64(1)).integers(0, 256, (64, 64, 3), dtype=np.uint8), "JPEG")
    )
    body[len(body) // 2 : len(body) // 2 + 64] = b"\xff\xd9" + bytes(62)
    assert refused(bytes(body)) in (Outcome.TRUNCATED, Outcome.CORRUPT)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b"", Outcome.NOT_IMAGE), (b"<!doctype html><title>404</title>", Outcome.NOT_IMAGE),
        (b'{"error": 404}', Outcome.NOT_IMAGE), (b"<svg xmlns='http://www.w3.org/2000/svg'/>", Outcome.UNSUPPORTED),
        (b"%PDF-1.7", Outcome.UNSUPPORTED), (b"\xff\x0a\xfa\x1f", Outcome.UNSUPPORTED),
        (b"\xff\xd8\xff", Outcome.CORRUPT), (b"\x89PNG\r\n\x1a\nnothing", Outcome.CORRUPT),
        *[(b"\xff\xd8\xff\xc0\0" + bytes([2 + n]) + b"\x08\0\x10\0\x10\x03"[:n] + b"\xff\xda\0\x0c", Outcome.CORRUPT)
          for n in range(7)],
    ],
)  # fmt: skip
def test_what_is_no_picture_has_its_outcome(body: bytes, outcome: Outcome) -> None:
    assert refused(body) == outcome


def bomb_png(side: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(3_000_000)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [9_000, 20_000, 60_000])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    body = bomb_png(side)
    read_header(saved(gradient(8, 8), "PNG"))  # what Pillow imports is no cost of the bomb
    tracemalloc.start()
    try:
        with pytest.raises(ImageError) as error:
            read_header(body)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert error.value.outcome == Outcome.BOMB
    assert not re.search(r"0x[0-9a-f]{6}", error.value.detail)


# ---- reducing and storing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(500, 375), (333, 1000), (301, 300), (97, 64), (2000, 1301)])
def test_reduction_is_pillows_antialiased_bicubic(width: int, height: int) -> None:
    rng = np.random.Generator(np.random.PCG64(width))
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    small = resize(noise, 64)
    assert min(small.shape[:2]) == 64
    reference = Image.fromarray(noise).resize(small.shape[1::-1], Image.Resampling.BICUBIC)
    assert np.abs(small.astype(int) - np.asarray(reference)).max() <= 1


def test_nothing_is_ever_enlarged() -> None:
    small = gradient(40, 30)
    assert resize(small, 256) is small
    assert resize(small, 30) is small


def test_read_only_pixels_are_fine() -> None:
    frozen = gradient(64, 64)
    frozen.flags.writeable = False
    assert resize(frozen, 16).shape == (16, 16, 3)


def test_scaled_decode_saves_work_and_keeps_the_picture() -> None:
    big = gradient(1600, 1200)
    body = saved(big, "JPEG", quality=90)
    header = read_header(body)
    scaled = decode(body, header, min_side=128)
    assert min(scaled.shape[:2]) < 1200 and min(scaled.shape[:2]) >= 128 * images.SCALED_DECODE_GAP
    assert decode(body, header, min_side=700).shape == big.shape
    assert far(resize(scaled, 128), resize(decode(body, header), 128)) < 1.0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_reducing_first_and_turning_and_colouring_later_gives_the_same_picture(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    body = saved(gradient(400, 300), "JPEG", quality=95, exif=exif, icc_profile=gamma_profile(1.8))
    header = read_header(body)
    plain = resize(decode(body, header, min_side=64), 64)
    assert far(reduced(body, header, 64), plain) < 1.0


def test_what_is_encoded_fits_as_it_is_and_metadata_does_not() -> None:
    body = encode_jpeg(gradient(300, 200), 90)
    header = read_header(body)
    assert header.baseline_420 and not header.metadata and not header.progressive
    assert fits_as_is(body, header, 200) and not fits_as_is(body, header, 199)
    exif = Image.Exif()
    exif[0x8825] = {1: "N", 2: (48.0, 8.0, 12.0)}  # GPS
    plain = Image.fromarray(gradient(300, 200))
    for options in (
        {"exif": exif}, {"subsampling": 0}, {"progressive": True}, {"comment": b"secret"},
        {"icc_profile": gamma_profile(1.0)},
    ):  # fmt: skip
        other = saved(plain, "JPEG", **{"subsampling": 2, **options})
        assert not fits_as_is(other, read_header(other), 200), options
    assert not fits_as_is(saved(plain, "PNG"), read_header(saved(plain, "PNG")), 200)
    with_tail = body + b"PK\3\4 and a zip archive"
    assert not fits_as_is(with_tail, read_header(with_tail), 200)


def test_damaged_headers_of_whole_pictures_are_forgiven() -> None:
    body = saved(gradient(64, 48), "JPEG", quality=95)
    junk = body[:2] + b"\xff\xe7\x00\x06junk" + b"stray" + body[2:]
    assert far(opened(junk), opened(body)) == 0


# ---- real files --------------------------------------------------------------------------------------------------------

WORDS = {
    "too_many_pixels": Outcome.BOMB, "unsupported_format": Outcome.UNSUPPORTED, "empty": Outcome.NOT_IMAGE,
    "unsupported_bit_depth": Outcome.UNSUPPORTED, "not_an_image": Outcome.NOT_IMAGE,
}  # fmt: skip
KNOWN_MISSES = {
    "heic_corrupted.heic": "without a HEIF codec a damaged HEIC file is told from a sound one by nobody: unsupported",
    "tiff_g4_orient6.tif": "its tags say 88x590 and a quarter turn, so 590x88 is right; the index has turned it twice",
    "jpeg_exif_bad.jpg": "not only its EXIF is damaged: libjpeg skips 1,214 bytes of the scan and stripes come out",
}


def nasty() -> list[Any]:
    index = Path(REAL) / "nasty" / "index.tsv"
    if not REAL or not index.exists():
        return [pytest.param({}, marks=pytest.mark.skip(reason="PAIRMILL_REAL_DATA is not set"))]
    with index.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    marks = {
        name: [pytest.mark.xfail(reason=reason, strict=True)] for name, reason in KNOWN_MISSES.items()
    }  # fmt: skip
    return [pytest.param(row, id=row["file"], marks=marks.get(row["file"], [])) for row in rows]


@pytest.mark.realdata
@pytest.mark.parametrize("row", nasty())
def test_difficult_real_files(row: dict[str, str]) -> None:
    expect = row["expect"]
    body = (Path(REAL) / "nasty" / row["file"]).read_bytes()
    size = re.search(r"decodes? (?:as )?(\d+)x(\d+)", expect)
    reject = re.search(r"reject: (\w+)", expect)
    try:
        header = read_header(body)
        shown = (header.width, header.height)
        if expect.startswith("decodes as"):  # too small or too long under any filter, so it is not decoded
            assert size and shown == (int(size[1]), int(size[2]))
            return
        pixels = decode(body, header, min_side=256)
        assert size and shown == (int(size[1]), int(size[2])), shown
        assert abs(pixels.shape[1] / pixels.shape[0] - shown[0] / shown[1]) < 0.02
    except ImageError as error:
        assert not re.search(r"0x[0-9a-f]{6}", error.detail)  # details are the same in every run
        assert expect.startswith("either") or reject, error
        if reject and not expect.startswith("either"):
            assert error.outcome == WORDS.get(reject[1], reject[1])


def test_a_remembered_head_hides_nothing_that_differs_behind_it() -> None:
    pixels = np.zeros((24, 40, 3), np.uint8)
    plain = encode_jpeg(pixels, 90)
    head, scan = plain[:2], plain[2:]
    comment = b"\xff\xfe\x00\x08\xff\xda\x00\x00\x00\x00"  # holds what looks like the begin of a scan
    for _ in range(2):  # the second time from memory
        assert not read_header(plain).metadata and fits_as_is(plain, read_header(plain), 24)
        assert read_header(plain + b"more").metadata
        assert read_header(plain[:-2]).metadata
        assert read_header(head + comment + scan).metadata
        with pytest.raises(ImageError) as refused:
            read_header(plain, max_pixels=24 * 40 - 1)
        assert refused.value.outcome == Outcome.BOMB

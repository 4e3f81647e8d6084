"""Image bytes to checked header, header to pixels, pixels to the small JPEG that is stored. Used by ingest and shardkit.

Way in: `read_header` looks at a few bytes and refuses bombs before a pixel is decoded; `decode` gives upright sRGB
pixels or an ImageError with the row's outcome, never half a picture. Way out: `resize`, then `encode_jpeg`; a file for
which `fits_as_is` holds is stored as it came.

Shapes: H height, W width, 3 channels; all pixels are uint8 sRGB, [H, W, 3], contiguous.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import re
import struct
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core.errors import ImageError
from core.schema import Outcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image, ImageCms

    Pixels = npt.NDArray[np.uint8]


MAX_PIXELS = 64_000_000  # 192 MB as RGB; phones and cameras of today stay below, a worker's memory does too
SCALED_DECODE_GAP = 1.4  # scaled decode leaves this many times the wanted side: the bicubic filter hides the DCT's edge
PILLOW_FORMATS = ("PNG", "WEBP", "GIF", "AVIF", "BMP", "TIFF", "ICO", "JPEG2000")
_SHIFTED = frozenset({5, 6, 7, 8})  # EXIF orientations that exchange width and height


@dataclass(frozen=True)
class Header:
    """What the first bytes say. `width` and `height` are as displayed, after orientation.

    `baseline_420` holds for 8-bit three-component YCbCr 4:2:0 baseline JPEG in one scan, which is what nvJPEG's hardware
    engine takes. `metadata` says that there is more in the file than a decoder needs (EXIF, comments, bytes after the
    end). `tidy` is the same JPEG without all that, to be decoded where the original makes libjpeg complain.
    """

    format: str
    width: int
    height: int
    orientation: int = 1
    baseline_420: bool = False
    progressive: bool = False
    components: int = 3
    metadata: bool = True
    icc: bytes | None = field(default=None, repr=False)
    tidy: bytes | None = field(default=None, repr=False)


def read_header(body: bytes, *, max_pixels: int = MAX_PIXELS) -> Header:
    """Format, size and orientation from the header alone; no pixel is decoded or allocated.

    Raises:
        ImageError: not_image, unsupported, corrupt, truncated, or bomb where it claims more than `max_pixels`.
    """
    family = _sniff(body)
    if family == "jpeg":
        return _read_jpeg(body, max_pixels)
    if body[4:8] == b"ftyp":
        for box in re.finditer(rb"\0\0\0\x14ispe", body):  # sizes of all items, before libavif may allocate one
            if len(size := body[box.end() + 4 : box.end() + 12]) == 8:
                width, height = struct.unpack(">II", size)
                _check_size(width, height, max_pixels)
    if family == "bmp" and len(body) >= 26 and struct.unpack_from("<i", body, 18)[0] < 0 and body[14] != 12:
        raise ImageError(Outcome.CORRUPT, "BMP of negative width")
    if family not in _DECODED:
        raise ImageError(Outcome.UNSUPPORTED, f"{family} is not decoded")
    return _read_other(body, family, max_pixels)


def decode(body: bytes, header: Header, *, min_side: int | None = None) -> Pixels:
    """Upright sRGB pixels [H, W, 3]; transparency lies on white; the first frame of an animation.

    Args:
        min_side: the shorter side that is wanted; a JPEG much larger than that is decoded at 1/2, 1/4 or 1/8 size.

    Raises:
        ImageError: truncated or corrupt; decoder warnings count as failures, because they mean invented pixels.
    """
    if _is_plain_jpeg(header):
        return _upright(_from_profile(_decode_jpeg(body, header, min_side), header.icc), header.orientation)
    return _upright(_decode_pillow(body, header), header.orientation)


def reduced(body: bytes, header: Header, size: int) -> Pixels:
    """`resize(decode(body, header, min_side=size), size)`, with profile and rotation applied to the small picture.

    For a JPEG with a profile other than sRGB that is the greatest cost, and one of pixels: 3.5 ms for a 500-pixel photograph.

    Raises:
        ImageError: as `decode`.
    """
    if not _is_plain_jpeg(header):
        return resize(decode(body, header), size)
    pixels = resize(_decode_jpeg(body, header, size), size)
    return _upright(_from_profile(pixels, header.icc), header.orientation)


def scales_while_decoding(header: Header, min_side: int) -> bool:
    """Whether `decode` would make other pixels for this `min_side` than without one."""
    large = min(header.width, header.height) >= 2 * int(min_side * SCALED_DECODE_GAP)
    return large and header.format == "jpeg" and header.components != 4


def resize(pixels: Pixels, size: int) -> Pixels:
    """Antialiased bicubic reduction to a shorter side of `size` pixels; never enlarges."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    if short <= size:
        return pixels
    target = (max(1, round(height * size / short)), max(1, round(width * size / short)))
    return _resample(pixels, target)


def encode_jpeg(pixels: Pixels, quality: int) -> bytes:
    """Baseline 4:2:0 JPEG without metadata; `quality` is libjpeg's, 1 to 100."""
    import simplejpeg

    return simplejpeg.encode_jpeg(pixels, quality, colorspace="RGB", colorsubsampling="420", fastdct=False)


def fits_as_is(body: bytes, header: Header, size: int) -> bool:
    """Whether the original bytes can be stored: baseline 4:2:0, upright, sRGB, no metadata, not larger than asked for."""
    small = min(header.width, header.height) <= size
    plain = header.baseline_420 and header.orientation == 1 and not header.metadata
    return bool(small and plain and not _is_foreign(header.icc))


# ---- what kind of file ------------------------------------------------------------------------------------------------

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8", "jpeg"), (b"\x89PN", "png"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II*\0", "tiff"), (b"MM\0*", "tiff"),
    (b"II+\0", "tiff"), (b"MM\0+", "tiff"), (b"\0\0\1\0", "ico"), (b"\0\0\0\x0cjP  ", "jpeg2000"),
    (b"\xff\x4f\xff\x51", "jpeg2000"), (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"), (b"%PDF", "PDF"),
    (b"8BPS", "PSD"), (b"\x1f\x8b", "gzip"), (b"PK\3\4", "zip"), (b"%!PS", "PostScript"), (b"\0\0\1\xba", "MPEG"),
    (b"\x1aE\xdf\xa3", "Matroska"), (b"#?RADIANCE", "HDR"), (b"v/1\1", "OpenEXR"), (b"DDS ", "DDS"), (b"FLV", "FLV"),
)  # fmt: skip
_DECODED = frozenset({"png", "gif", "bmp", "tiff", "ico", "jpeg2000", "webp", "avif"})


def _sniff(body: bytes) -> str:
    """The format by content, because names and Content-Type lie."""
    if not body:
        raise ImageError(Outcome.NOT_IMAGE, "empty body")
    if body.startswith(b"\xff\xd8"):
        return "jpeg"
    family = next((name for magic, name in _MAGIC if body.startswith(magic)), "")
    if body[:4] == b"RIFF" and body[8:12] == b"WEBP":
        family = "webp"
    elif body[4:8] == b"ftyp":
        brands = body[8 : min(int.from_bytes(body[:4], "big"), 128)]
        family = "avif" if b"avif" in brands or b"avis" in brands else "HEIF or video"
    elif not family and body[-18:-2] == b"TRUEVISION-XFILE":
        family = "TGA"
    elif not family and b"<svg" in body[:1024].lower():
        family = "SVG"
    if not family:
        raise ImageError(Outcome.NOT_IMAGE, f"starts with {body[:16]!r}")
    return family


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width <= 0 or height <= 0 or width > 1 << 31 or height > 1 << 31:
        raise ImageError(Outcome.CORRUPT, f"claims to be {width}x{height}")
    if width * height > max_pixels:
        raise ImageError(Outcome.BOMB, f"{width}x{height} is more than {max_pixels:,} pixels")


# ---- JPEG -------------------------------------------------------------------------------------------------------------

_SOI, _EOI, _SOS, _APP0, _APP1, _APP2, _APP14, _APP15, _COM = 0xD8, 0xD9, 0xDA, 0xE0, 0xE1, 0xE2, 0xEE, 0xEF, 0xFE
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF markers; the three others are tables
_JFIF_BYTES = 18  # APP0 with JFIF 1.01 and no thumbnail, marker included


def _read_jpeg(body: bytes, max_pixels: int) -> Header:
    start = body.find(b"\xff\xda", 0, 4096)
    if start > 0 and body.endswith(b"\xff\xd9") and (header := _read_plain_jpeg(body[: start + 5])):
        _check_size(header.width, header.height, max_pixels)
        return header
    return _parse_jpeg(body, max_pixels)


@functools.lru_cache(maxsize=4096)
def _read_plain_jpeg(head: bytes) -> Header | None:
    """The header of a JPEG that begins with `head`, up to its scan, and holds no metadata; None for every other one.

    Encoders write the same few hundred bytes before every picture of a size, so reading them once saves packing a third
    of its time.
    """
    try:
        header = _parse_jpeg(head + b"\xff\xd9", 1 << 62)
    except ImageError:
        return None  # of the head alone; the whole file will say why
    return None if header.metadata or header.tidy else header


def _parse_jpeg(body: bytes, max_pixels: int) -> Header:
    segments, scan, junk = _jpeg_segments(body)
    frame = next((data for marker, data in segments if marker in _FRAMES), None)
    kind = next((marker for marker, _ in segments if marker in _FRAMES), 0)
    if frame is None or len(frame) < 6 or len(frame) < 6 + 3 * frame[5]:
        raise ImageError(Outcome.CORRUPT, "JPEG without a whole frame header before its scan")
    precision, height, width, components = struct.unpack_from(">BHHB", frame)
    _check_size(width, height, max_pixels)
    if precision != 8:
        raise ImageError(Outcome.UNSUPPORTED, f"JPEG of {precision} bits, {width}x{height}")
    adobe = next((data for marker, data in segments if marker == _APP14 and data[:5] == b"Adobe"), b"")
    sampling = [frame[7 + 3 * i] for i in range(components)]
    transform = adobe[11] if len(adobe) >= 12 else None
    scan_components = body[scan + 4] if scan + 4 < len(body) else 0
    orientation = next((o for marker, data in segments if marker == _APP1 and (o := _exif_orientation(data))), 1)
    shifted = orientation in _SHIFTED
    return Header(
        "jpeg", height if shifted else width, width if shifted else height, orientation,
        baseline_420=kind == 0xC0 and sampling == [0x22, 0x11, 0x11] and transform != 0 and scan_components == 3,
        progressive=kind in (0xC2, 0xC6, 0xCA, 0xCE),
        components=components,
        metadata=junk or not body.endswith(b"\xff\xd9") or any(_is_metadata(m, data) for m, data in segments),
        icc=_join_icc(segments),
        tidy=_tidy(body, segments, scan) if junk or any(m == _APP2 for m, _ in segments) else None,
    )  # fmt: skip


def _jpeg_segments(body: bytes) -> tuple[list[tuple[int, bytes]], int, bool]:
    """Segments (marker, data) before the first scan, where the scan starts, and whether junk lay between them."""
    segments: list[tuple[int, bytes]] = []
    position, junk = 2, False
    while True:
        found = body.find(b"\xff", position)
        if found < 0 or found + 4 > len(body):
            raise ImageError(Outcome.CORRUPT, "JPEG that ends before its first scan")
        junk |= found != position
        marker = body[found + 1]
        if marker == 0xFF:
            position = found + 1
        elif marker in (0x00, 0x01) or 0xD0 <= marker <= _SOI:
            position, junk = found + 2, True
        elif marker == _EOI:
            raise ImageError(Outcome.CORRUPT, "JPEG without a scan")
        else:
            if marker == _SOS:
                return segments, found, junk
            length = int.from_bytes(body[found + 2 : found + 4], "big")
            if length < 2:
                raise ImageError(Outcome.CORRUPT, f"JPEG segment {marker:#x} of {length} bytes")
            segments.append((marker, body[found + 4 : found + 2 + length]))
            position = found + 2 + length


def _is_metadata(marker: int, data: bytes) -> bool:
    if marker == _APP0:
        return len(data) + 4 > _JFIF_BYTES
    return marker == _COM or (_APP1 <= marker <= _APP15 and marker not in (_APP2, _APP14))


def _tidy(body: bytes, segments: list[tuple[int, bytes]], scan: int) -> bytes:
    kept = [(m, d) for m, d in segments if not (_APP0 <= m <= _APP15 and m != _APP14) and m != _COM]
    parts = [b"\xff" + bytes([m]) + (len(d) + 2).to_bytes(2, "big") + d for m, d in kept]
    return b"".join([b"\xff\xd8", *parts, body[scan:]])


def _join_icc(segments: list[tuple[int, bytes]]) -> bytes | None:
    """The ICC profile of all its APP2 chunks, None where there is none or a chunk is missing."""
    chunks = {d[12]: d[14:] for m, d in segments if m == _APP2 and d[:12] == b"ICC_PROFILE\0" and len(d) > 14}
    counts = {d[13] for m, d in segments if m == _APP2 and d[:12] == b"ICC_PROFILE\0" and len(d) > 14}
    if not chunks or counts != {len(chunks)} or set(chunks) != set(range(1, len(chunks) + 1)):
        return None
    return b"".join(chunks[i] for i in sorted(chunks))


def _exif_orientation(data: bytes) -> int:
    """Orientation 1 to 8 of an APP1 segment, 0 where it says none. Damaged EXIF says none."""
    if data[:6] != b"Exif\0\0" or data[6:8] not in (b"II", b"MM"):
        return 0
    order = "<" if data[6:8] == b"II" else ">"
    try:
        (start,) = struct.unpack_from(order + "I", data, 10)
        (entries,) = struct.unpack_from(order + "H", data, 6 + start)
        for i in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", data, 8 + start + 12 * i)
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else 0
    except struct.error:
        return 0
    return 0


def _is_plain_jpeg(header: Header) -> bool:
    """A JPEG that is not of inks, which need their profile, or Pillow's reading of Adobe's inverted values."""
    return header.format == "jpeg" and header.components != 4


def _decode_jpeg(body: bytes, header: Header, min_side: int | None) -> Pixels:
    """Pixels as they lie in the file: neither turned nor through their profile."""
    import simplejpeg

    scale: dict[str, Any] = {}
    if min_side and scales_while_decoding(header, min_side):
        wanted = int(min_side * SCALED_DECODE_GAP)
        scale = {"min_height": wanted, "min_width": wanted, "min_factor": 2}
    for source in (body, header.tidy):
        try:
            return simplejpeg.decode_jpeg(source, colorspace="RGB", strict=True, **scale)
        except ValueError as error:
            message = str(error)
        if header.tidy is None:
            break
    if "subsampling" in message:
        # ratios that TurboJPEG's interface has no name for
        return _decode_pillow(body, dataclasses.replace(header, icc=None))
    raise ImageError(Outcome.TRUNCATED if "Premature end of JPEG" in message else Outcome.CORRUPT, message)


# ---- everything else, by Pillow ---------------------------------------------------------------------------------------


def _read_other(body: bytes, family: str, max_pixels: int) -> Header:
    image = _open(body, PILLOW_FORMATS)
    width, height = image.size
    _check_size(width, height, max_pixels)
    orientation = 1 if _needs_no_turning(body, family) else _pillow_orientation(image)
    if orientation in _SHIFTED:
        width, height = height, width
    return Header(
        family, width, height, orientation, components=len(image.getbands()), icc=image.info.get("icc_profile")
    )


def _open(body: bytes, formats: tuple[str, ...]) -> Image.Image:
    from PIL import Image

    _quiet_pillow()
    try:
        return Image.open(io.BytesIO(body), formats=formats)
    except Image.DecompressionBombError as error:
        raise ImageError(Outcome.BOMB, _words(error).partition(" exceeds")[0]) from error
    except Exception as error:  # plugins raise whatever they stumble over: struct, Syntax, Value, Type errors
        raise ImageError(Outcome.CORRUPT, _words(error)) from error


def _words(error: Exception) -> str:
    """The codec's complaint without memory addresses, so that equal bytes get equal rows."""
    return re.sub(r" *<.*?>", "", str(error))[:200] or type(error).__name__


def _quiet_pillow() -> None:
    # Pillow warns about damaged metadata and big images, both of which are handled here; catch_warnings would be a race
    # between decoding threads
    wanted = ("ignore", None, Warning)
    if not any(f[:3] == wanted and f[3] is not None and f[3].pattern == r"PIL\." for f in warnings.filters):
        warnings.filterwarnings("ignore", category=Warning, module=r"PIL\.")


def _needs_no_turning(body: bytes, family: str) -> bool:
    # Pillow turns TIFFs itself, size and pixels; for the EXIF of a PNG, which may stand at its end, it decodes the picture
    return family == "tiff" or (family == "png" and b"eXIf" not in body and b"Raw profile type" not in body)


def _pillow_orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # any damage to metadata means upright
        return 1
    return value if value in range(1, 9) else 1


def _decode_pillow(body: bytes, header: Header) -> Pixels:
    import numpy as np
    from PIL import Image

    image = _open(body, ("JPEG",) if header.format == "jpeg" else PILLOW_FORMATS)
    try:
        image.load()
        return np.array(_to_rgb(image, header.icc))
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(Outcome.BOMB, str(error)) from error
    except Exception as error:  # codecs raise OSError, but also struct, Syntax, Value, Type and zlib errors
        message = _words(error)
        cut = "truncated" in message.lower() or "takes at most" in message  # the second: an interlaced PNG cut short
        raise ImageError(Outcome.TRUNCATED if cut else Outcome.CORRUPT, message) from error


def _to_rgb(image: Image.Image, icc: bytes | None) -> Image.Image:
    """Any Pillow mode as RGB: 16 bits scaled, inks and Lab converted, profiles applied, transparency on white."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.uint32)
        if values.max(initial=0) > 0xFFFF:
            raise ImageError(Outcome.UNSUPPORTED, "32-bit integer samples")
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ImageError(Outcome.UNSUPPORTED, "floating-point samples")
    alpha = None
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
        image = image.convert("RGB")
    if image.mode in ("P", "1", "YCbCr", "HSV"):
        image = image.convert("RGB")
    colour = _profiled(image, icc).convert("RGB")
    if alpha is None:
        return colour
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(colour, mask=alpha)
    return white


# ---- colour -----------------------------------------------------------------------------------------------------------

_SAME_COLOUR = 3  # of 255: a profile that moves no colour further than this is sRGB for our purposes


def _from_profile(pixels: Pixels, icc: bytes | None) -> Pixels:
    if not _is_foreign(icc):
        return pixels
    import numpy as np
    from PIL import Image

    return np.array(_profiled(Image.fromarray(pixels), icc).convert("RGB"))


def _profiled(image: Image.Image, icc: bytes | None) -> Image.Image:
    """`image` through its profile to sRGB; a profile that is damaged or of another colour space is ignored."""
    from PIL import ImageCms

    transform = _transform(icc, image.mode) if icc and image.mode in ("RGB", "L", "CMYK") else None
    return image if transform is None else ImageCms.applyTransform(image, transform) or image


@functools.lru_cache(maxsize=128)
def _transform(icc: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    from PIL import ImageCms

    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
        # without LittleCMS's one-pixel cache, a transform serves all threads; building one costs as much as applying it
        flags = ImageCms.Flags.NOCACHE
        return ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB", flags=flags)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


@functools.lru_cache(maxsize=64)
def _is_foreign(icc: bytes | None) -> bool:
    """Whether an RGB profile moves colours; most embedded profiles are sRGB and cost nothing beyond this look."""
    if icc is None:
        return False
    import numpy as np
    from PIL import Image

    transform = _transform(icc, "RGB")
    if transform is None:
        return False
    levels = np.array([0, 32, 64, 96, 128, 160, 192, 224, 255], np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(27, 27, 3)
    moved = transform.apply(Image.fromarray(grid))
    return int(np.abs(np.asarray(moved).astype(int) - grid).max()) > _SAME_COLOUR


# ---- geometry ---------------------------------------------------------------------------------------------------------


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Undo EXIF orientation: 2 to 8 are the seven other symmetries of the rectangle (EXIF 2.3, section 4.6.4)."""
    import numpy as np

    if orientation == 1:
        return pixels
    if orientation in _SHIFTED:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


@functools.cache
def _resampler() -> Any:
    """cykooz.resizer's class and options for an antialiased bicubic (a = -1/2), or None where it is not to be used."""
    import PIL

    if ".post" in PIL.__version__:  # how pillow-simd tells itself from Pillow
        return None
    try:
        import cykooz_resizer as simd
    except ImportError:  # a platform that it has no wheel for
        return None
    bicubic = simd.ResizeAlg.convolution(simd.FilterType.catmull_rom)
    return simd, simd.ResizeOptions(resize_alg=bicubic, use_alpha=False)


def _resample(pixels: Pixels, target: tuple[int, int]) -> Pixels:
    # 500x375 to 341x256 on one core: cykooz.resizer 0.43 ms, torch 0.77 ms, plain Pillow 2.6 ms, which is more than decode
    # and encode together; torch costs 1.3 s of import and 180 MB a process on top
    import numpy as np
    from PIL import Image

    if (found := _resampler()) is None:
        return np.array(Image.fromarray(pixels).resize(target[::-1], Image.Resampling.BICUBIC))
    simd, options = found
    height, width = pixels.shape[:2]
    source = simd.ImageData(width, height, simd.PixelType.U8x3, pixels.tobytes())
    small = simd.ImageData(target[1], target[0], simd.PixelType.U8x3)
    simd.Resizer().resize(source, small, options)
    return np.frombuffer(small.get_buffer(), np.uint8).reshape(*target, 3)  # read-only: one copy less

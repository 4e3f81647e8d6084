"""Decoding: both back-ends give the same pixels, choose the same window, and survive the same bad pictures."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

from core.images import encode_jpeg, read_header
from tests.train.shards import photograph
from train.decode_cpu import CpuDecoder, Decoder, Picture, View, middle_view, random_view, render
from train.decode_dali import DaliDecoder, dali_installed
from train.decode_pool import GREY

SIZE = 32
needs_dali = pytest.mark.skipif(not dali_installed(), reason="DALI is not installed")


def picture(data: bytes, view: View | None = None) -> Picture:
    header = read_header(data)
    return Picture(data, header, view or middle_view(header.width, header.height))


def jpeg(number: int, width: int = 96, height: int = 72) -> bytes:
    return encode_jpeg(photograph(number, width, height), 90)


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(params=["cpu", pytest.param("dali", marks=needs_dali)])
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    made: Decoder = (
        CpuDecoder(SIZE, 2) if request.param == "cpu" else DaliDecoder(SIZE, 1, 8, torch.device("cpu"))
    )  # fmt: skip
    with closing(made):
        yield made


def test_a_window_of_the_target_size_is_the_pixels_themselves(decoder: Decoder) -> None:
    pixels = photograph(1, 60, 50)
    got, reasons = decoder.decode([picture(png(pixels), View(7, 5, SIZE, SIZE))])
    assert not reasons
    assert torch.equal(got[0], torch.from_numpy(pixels[5 : 5 + SIZE, 7 : 7 + SIZE].copy()).permute(2, 0, 1))


def test_a_mirrored_window_is_the_mirror_image(decoder: Decoder) -> None:
    data, view = jpeg(2), View(10, 4, 50, 60)
    got, _ = decoder.decode([picture(data, view), picture(data, view._replace(flip=True))])
    assert torch.equal(got[0].flip(-1), got[1])


def test_resize_is_close_to_pillows_bicubic(decoder: Decoder) -> None:
    pixels = photograph(3, 96, 72)
    got, _ = decoder.decode([picture(png(pixels), View(0, 0, 96, 72))])
    wanted = np.asarray(Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BICUBIC))
    assert np.abs(got[0].permute(1, 2, 0).numpy().astype(int) - wanted.astype(int)).mean() < 0.6


@needs_dali
def test_dali_and_cpu_threads_agree_on_photographs() -> None:
    draw = Random(0)
    pictures = [picture(jpeg(n), random_view(96, 72, draw, 0.9, flip=True)) for n in range(16)]
    with closing(CpuDecoder(SIZE, 2)) as cpu, closing(DaliDecoder(SIZE, 1, 16, torch.device("cpu"))) as dali:
        mine, _ = cpu.decode(pictures)
        theirs, _ = dali.decode(pictures)
    assert mine.shape == theirs.shape == (16, 3, SIZE, SIZE) and theirs.dtype == torch.uint8
    assert (mine.float() - theirs.float()).abs().mean() <= 0.5
    assert mine.float().std() > 20  # the pictures are no plain areas on which anything agrees


def test_bad_pictures_are_found_and_the_others_decoded(decoder: Decoder) -> None:
    whole = jpeg(4)
    broken = whole[:250] + bytes(300) + whole[550:]
    pictures = [picture(whole), picture(whole)._replace(data=broken), None,
                picture(whole)._replace(data=whole[: len(whole) // 2]), picture(jpeg(5))]  # fmt: skip
    for _ in range(2):  # the second time with whatever the first left behind
        got, reasons = decoder.decode(pictures)
        assert sorted(reasons) == [1, 3] and all(reasons.values())
        assert (got[[1, 2, 3]] == GREY).all()
        expected = torch.stack([render(picture(whole), SIZE), render(picture(jpeg(5)), SIZE)])
        assert (got[[0, 4]].float() - expected.float()).abs().mean() <= 0.5


@needs_dali
def test_dali_is_built_again_after_a_bad_picture() -> None:
    whole = jpeg(4)
    with closing(DaliDecoder(SIZE, 1, 4, torch.device("cpu"))) as dali:
        dali.decode([picture(whole)])
        assert dali.rebuilt == 0
        dali.decode([picture(whole)._replace(data=whole[:250] + bytes(300) + whole[550:])])
        assert dali.rebuilt == 1


def test_formats_and_orientation_are_the_same_for_both(decoder: Decoder) -> None:
    pixels = photograph(6, 64, 48)
    rotated = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned by 90 degrees
    Image.fromarray(pixels).save(rotated, "JPEG", quality=95, exif=exif)
    grey = io.BytesIO()
    Image.fromarray(pixels).convert("L").save(grey, "JPEG", quality=95)
    webp = io.BytesIO()
    Image.fromarray(pixels).save(webp, "WEBP", lossless=True)
    pictures = [picture(rotated.getvalue()), picture(grey.getvalue()), picture(webp.getvalue())]
    assert (pictures[0].header.width, pictures[0].header.height) == (48, 64)
    got, reasons = decoder.decode(pictures)
    assert not reasons
    for row, one in zip(got, pictures, strict=True):
        assert (row.float() - render(one, SIZE).float()).abs().mean() <= 0.5
    assert (got[1, 0].float() - got[1, 2].float()).abs().max() <= 1
    upright = render(picture(png(np.ascontiguousarray(np.rot90(pixels, -1)))), SIZE)
    wrong_way = render(picture(png(np.ascontiguousarray(np.rot90(pixels, 1)))), SIZE)
    assert (got[0].float() - upright.float()).abs().mean() < 8 < 16 < (got[0].float() - wrong_way.float()).abs().mean()


def test_random_windows_stay_inside_and_keep_their_share() -> None:
    draw = Random(1)
    for width, height in ((64, 48), (48, 64), (500, 160), (1, 1), (7, 300)):
        for _ in range(200):
            view = random_view(width, height, draw, 0.9)
            assert view.left >= 0 and view.left + view.width <= width
            assert view.top >= 0 and view.top + view.height <= height
            assert view.width >= 1 and view.height >= 1
    shares = [v.width * v.height / (64 * 48) for v in (random_view(64, 48, draw, 0.9) for _ in range(500))]
    assert 0.88 < min(shares) < 0.92 and 0.97 < max(shares) <= 1


def test_windows_and_mirrors_are_a_function_of_the_draw() -> None:
    views = [random_view(640, 480, Random(n), 0.5, flip=True) for n in range(200)]
    assert views == [random_view(640, 480, Random(n), 0.5, flip=True) for n in range(200)]
    assert len({v[:4] for v in views}) > 190
    assert 60 < sum(v.flip for v in views) < 140


def test_middle_view_is_the_largest_square_in_the_middle() -> None:
    assert middle_view(100, 60) == View(20, 0, 60, 60)
    assert middle_view(60, 101) == View(0, 20, 60, 60)

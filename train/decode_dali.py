"""The same pixels from DALI: one graph, on the GPU's decoders ("mixed") or on the CPU.

    external_source (bytes, window, mirror) -> decoders.image_slice -> resize -> flip (-> recolour, in torch)

DALI gives up on a batch when one picture is bad, and the pipeline is dead from then on; a JPEG that ends early it fills
with grey and says nothing. So a picture without its end marker is looked at before the batch, a batch that failed is
looked at afterwards (by libjpeg-turbo in its strict mode), the bad ones are replaced, and the pipeline is built again.
What it shows without a word is a picture damaged in the middle of its scan: the checksums of our shards find those before.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from core import images
from core.errors import HardwareError, ImageError, RunError
from train.colour import recolour
from train.decode_cpu import CpuDecoder, Decoded, Decoder, Picture, View, middle_view
from train.decode_pool import GREY

if TYPE_CHECKING:
    from nvidia.dali.pipeline import Pipeline

log = logging.getLogger("pairmill.train")

JPEG_END = b"\xff\xd9"
INSTALL = "pip install 'pairmill[dali]'"


def dali_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


class DaliDecoder(Decoder):
    """Decodes batches of at most `batch` pictures; pixels stay on `device`.

    Raises:
        HardwareError: DALI is not installed.
    """

    def __init__(self, size: int, threads: int, batch: int, device: torch.device) -> None:
        if not dali_installed():
            raise HardwareError(f"--decode dali needs NVIDIA DALI, which is not installed; run: {INSTALL}")
        self.size, self.threads, self.batch, self.device = size, max(1, threads), max(1, batch), device
        self.rebuilt = 0
        self._lock = threading.Lock()  # evaluation decodes while the loader reads ahead, and a pipeline is one caller's
        self._pipeline = self._build()
        self._spare: CpuDecoder | None = None

    def begin(self, pictures: Sequence[Picture | None]) -> Callable[[], Decoded]:
        return functools.partial(self._decode, pictures)

    def _decode(self, pictures: Sequence[Picture | None]) -> Decoded:
        with self._lock:
            return self._with_faults(pictures)

    def _with_faults(self, pictures: Sequence[Picture | None]) -> Decoded:
        reasons: dict[int, str] = {}
        ready = [None if p is None else self._prepared(i, p, reasons) for i, p in enumerate(pictures)]
        try:
            return self._run(ready), reasons
        except RuntimeError as error:
            self._rebuild()
            bad = {i: reason for i, p in enumerate(ready) if p is not None and (reason := _fault(p))}
            reasons |= bad
            log.warning("DALI gave up on a batch with %d bad pictures (%s)", len(bad), str(error).split("\n")[0][:200])
        try:
            return self._run([None if i in reasons else p for i, p in enumerate(ready)]), reasons
        except RuntimeError:  # something that libjpeg-turbo reads and DALI does not: slower, but nothing is lost
            self._rebuild()
            self._spare = self._spare or CpuDecoder(self.size, self.threads)
            pixels, undecoded = self._spare.decode([None if i in reasons else p for i, p in enumerate(pictures)])
            return pixels.to(self.device), reasons | undecoded

    def close(self) -> None:
        if self._spare is not None:
            self._spare.close()
        if self._lock.acquire(blocking=False):
            del self._pipeline
        else:
            atexit.register(_leave)

    def _prepared(self, i: int, picture: Picture, reasons: dict[int, str]) -> Picture | None:
        """The picture as DALI may have it: plain JPEG as it is, all else as upright pixels."""
        header = picture.header
        plain = header.format == "jpeg" and header.components in (1, 3) and header.orientation == 1
        try:
            if not (plain and header.icc is None):
                return picture._replace(data=_as_ppm(images.decode(picture.data, header)))
            if not picture.data.endswith(JPEG_END):
                images.decode(picture.data, header)
            if header.tidy is not None:
                return picture._replace(data=header.tidy)
        except ImageError as error:
            reasons[i] = error.detail
            return None
        return picture

    def _run(self, pictures: Sequence[Picture | None]) -> Tensor:
        """Pixels uint8 (B, C, S, S) on the device; RuntimeError leaves a dead pipeline."""
        datas = [_PLACEHOLDER if p is None else p.data for p in pictures]
        views = [_PLACEHOLDER_VIEW if p is None else p.view for p in pictures]
        feeds = {
            "data": [np.frombuffer(data, np.uint8) for data in datas],
            "anchor": [np.array([v.top, v.left], np.int32) for v in views],
            "shape": [np.array([v.height, v.width], np.int32) for v in views],
            "flip": [np.array(v.flip, np.int32) for v in views],
        }
        for name, values in feeds.items():
            self._pipeline.feed_input(name, values)
        out: Any = self._pipeline.run()[0]
        pixels = torch.from_numpy(np.array(out.as_array())) if self.device.type == "cpu" else self._copied(out)
        pixels = pixels.permute(0, 3, 1, 2)
        recolour(pixels, [view.colour for view in views])
        return pixels

    def _copied(self, out: Any) -> Tensor:
        from nvidia.dali.plugin.pytorch import feed_ndarray

        dense = out.as_tensor()
        pixels = torch.empty(dense.shape(), dtype=torch.uint8, device=self.device)
        feed_ndarray(dense, pixels, cuda_stream=torch.cuda.current_stream(self.device))
        return pixels

    def _rebuild(self) -> None:
        self.rebuilt += 1
        self._pipeline = self._build()

    def _build(self) -> Pipeline:
        import nvidia.dali.fn as fn
        from nvidia.dali import types as dali_types
        from nvidia.dali.pipeline import Pipeline

        types: Any = dali_types  # its constants are made at run time, where no type checker sees them
        gpu = self.device.type == "cuda"
        pipeline = Pipeline(
            batch_size=self.batch,
            num_threads=self.threads,
            device_id=(self.device.index or 0) if gpu else None,
            prefetch_queue_depth=1,
        )
        with pipeline:
            data = fn.external_source(name="data", dtype=types.UINT8, ndim=1)
            anchor = fn.external_source(name="anchor", dtype=types.INT32, ndim=1)
            shape = fn.external_source(name="shape", dtype=types.INT32, ndim=1)
            flip: Any = fn.external_source(name="flip", dtype=types.INT32, ndim=0)
            # Orientation is undone before (`_prepared`), so that windows mean the same to every back-end; exact chroma
            # upsampling, because the fast one moves pixels of coloured edges by more than the resize does.
            window = fn.decoders.image_slice(
                data,
                anchor,
                shape,
                device="mixed" if gpu else "cpu",
                axis_names="HW",
                normalized_anchor=False,
                normalized_shape=False,
                adjust_orientation=False,
                output_type=types.RGB,
                jpeg_fancy_upsampling=True,
            )
            square: Any = fn.resize(
                window, resize_x=self.size, resize_y=self.size, interp_type=types.INTERP_CUBIC, antialias=True
            )
            pipeline.set_outputs(fn.flip(square, horizontal=flip))
        pipeline.build()
        return pipeline


def _leave() -> None:
    """End the process at once, as after the error that a hanging batch was: DALI would wait for that batch, or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(RunError.exit_code)


def _fault(picture: Picture) -> str | None:
    """Why libjpeg-turbo refuses the picture, None where it does not."""
    if picture.data.startswith(b"P6"):
        return None
    try:
        images.decode(picture.data, picture.header)
    except ImageError as error:
        return error.detail
    return None


def _as_ppm(pixels: np.ndarray) -> bytes:
    """Pixels in the plainest format that DALI reads."""
    return b"P6 %d %d 255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes()


_PLACEHOLDER = _as_ppm(np.full((8, 8, 3), GREY, np.uint8))
_PLACEHOLDER_VIEW: View = middle_view(8, 8)

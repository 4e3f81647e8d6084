"""A codec for the decoder's workers that does what a picture's first word says; see `train.decode_pool.CODEC`."""

from __future__ import annotations

import os
import signal
import time

import torch

from core.errors import ImageError
from core.schema import Outcome
from train import decode_cpu
from train.decode_pool import Pixels

BURNT_S = 8.0  # of CPU, more than it takes to start everything


def render_into(pixels: Pixels, data: bytes, view: decode_cpu.View) -> None:
    word, _, rest = data.partition(b" ")
    if word == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif word == b"once":  # the first worker that sees it dies, the next one does not
        try:
            os.close(os.open(rest, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pixels[:] = 7
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    elif word == b"hang":
        while True:
            time.sleep(1)
    elif word == b"burn":
        while time.process_time() < BURNT_S:
            pass
    elif word == b"fault":
        raise ZeroDivisionError("of the codec's own")
    elif word == b"half":
        pixels[: len(pixels) // 2] = 7
        raise ImageError(Outcome.TRUNCATED, "only half of it")
    elif word == b"priority":
        pixels[:] = torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0), 0
    elif word == b"fill":
        pixels[:] = int(rest)
    else:
        decode_cpu.render_into(pixels, data, view)

"""Makes the codecs of a worker deadly: imported into the process that workers are forked from, see run_deadly.py."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from ingest import decoding, fetch
from ingest.pictures import Picture, Rules, prepare

CRASHES, NEVER_ENDS = b"\xff\xfe\x00\x0acrashes!", b"\xff\xfe\x00\x0anoend..!"  # JPEG comments
WAITS = b"\xff\xfe\x00\x0awaits..!"
STOP = "PAIRMILL_TEST_STOP"  # a folder: who decodes a picture that waits notes its process there, until there is a file `go`


def deadly(body: bytes, rules: Rules) -> Picture:
    if CRASHES in body:
        ctypes.string_at(0)  # a signal sent to oneself would leave the thread some time to go on
    while NEVER_ENDS in body:
        pass
    if WAITS in body:
        stop = Path(os.environ[STOP])
        (stop / str(os.getpid())).touch()
        while not (stop / "go").exists():
            time.sleep(0.005)
    return prepare(body, rules)


fetch.prepare = deadly
decoding.LONGEST_CPU_S = 2.0  # of CPU: a first picture imports its codec, which takes longer on a busy machine

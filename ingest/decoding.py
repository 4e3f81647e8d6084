"""Which pictures a worker is decoding, noted outside of it, so that a codec that crashes or never ends costs one row.

A codec in a process of its own for every picture would be safest, but copying each picture there and back costs more than
decoding it. So the worker decodes itself and notes the URL before; when it dies, the run begins its units again with that
URL refused. A first death may have other reasons, and with several decoding threads the note names several URLs; so the
units go on with one thread, and the next death condemns the URL that is noted alone. A worker with a thread that has
burnt `LONGEST_CPU_S` in one picture brings itself down and names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from core.plan import Unit
from core.schema import Outcome
from ingest.pictures import Picture

log = logging.getLogger("pairmill.ingest")

LONGEST_CPU_S = 60.0  # 64 million pixels take the slowest codec a sixth of that
LOOK_S = 0.5
IDLE_DEATHS = 3  # of one run of units; more have a cause that the next worker will meet, too
_KEY_BYTES = 32
_FREE = bytes(_KEY_BYTES)


@dataclass
class Blame:
    """What earlier deaths have taught of a unit: keys of URLs not to decode, whether to decode one at a time, and how many
    deaths there were while nothing was being decoded."""

    keys: list[str] = field(default_factory=list)
    alone: bool = False
    idle_deaths: int = 0


def key_of(url: str) -> str:
    """A name of `url` of fixed length."""
    return hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES // 2).hexdigest()


def blame(place: Path, unit: str) -> Blame:
    """What is known of `unit`, in the folder `place` that workers and their parent share."""
    path = place / f"{unit}.blame"
    return Blame(**json.loads(path.read_text())) if path.exists() else Blame()


def survive(unit: Unit, *, place: Path) -> bool:
    """Find out by the note of a dead worker what brought it down; False where, again and again, it was not decoding."""
    known, note, endless = blame(place, unit.id), place / f"{unit.id}.note", place / f"{unit.id}.endless"
    certain = known.alone or endless.exists()
    data = endless.read_bytes() if endless.exists() else note.read_bytes() if note.exists() else b""
    endless.unlink(missing_ok=True)
    keys = {data[i : i + _KEY_BYTES] for i in range(0, len(data), _KEY_BYTES)} - {_FREE}
    if not keys:  # killed from outside: for want of memory, or by hand
        known.idle_deaths += 1
        log.warning("a worker was killed; %s goes on with what its journal holds", unit.id)
    else:
        if certain and len(keys) == 1:
            known.keys += [key.decode() for key in keys]
        known.alone = True
        log.warning("a worker died while decoding; %s goes on, decoding one picture at a time", unit.id)
    (place / f"{unit.id}.blame").write_text(json.dumps(asdict(known)))
    return known.idle_deaths <= IDLE_DEATHS


def refused(body: bytes) -> Picture:
    """What becomes of a picture that brought a worker down."""
    words = "its decoder crashed or did not end"
    return Picture(Outcome.CORRUPT, words, received=len(body), sha256=hashlib.sha256(body).hexdigest())


class Watch:
    """Keeps the note of `unit` in `place`, and an eye on threads that decode for too long."""

    def __init__(self, place: Path, unit: str) -> None:
        self._endless = place / f"{unit}.endless"
        self._file = os.open(place / f"{unit}.note", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._threads: dict[int, tuple[bytes, float]] = {}  # thread -> (what it decodes, its CPU seconds before)
        self._slots: dict[int, int] = {}
        self._over = threading.Event()
        self._eye = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._eye.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._eye.join()
        os.close(self._file)

    @contextlib.contextmanager
    def decoding(self, url: str) -> Iterator[None]:
        """Around the decoding of one picture, in the thread that does it."""
        thread, key = threading.get_ident(), key_of(url).encode()
        place = self._slots.setdefault(thread, len(self._slots)) * _KEY_BYTES
        os.pwrite(self._file, key, place)
        self._threads[thread] = key, time.thread_time()
        try:
            yield
        finally:
            del self._threads[thread]
            os.pwrite(self._file, _FREE, place)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            for thread, (key, before) in list(self._threads.items()):
                if time.clock_gettime(time.pthread_getcpuclockid(thread)) - before > LONGEST_CPU_S:
                    self._endless.write_bytes(key)
                    os.kill(os.getpid(), signal.SIGKILL)

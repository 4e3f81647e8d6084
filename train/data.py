"""Shards to batches on the device's doorstep: read ahead, decode ahead, tokenise, and measure who waits for whom.

Shape letters: b samples of this rank, C = 3 colours, S side of the square, L longest caption of the batch in tokens.

    BatchReader (threads) -> [queue] -> one thread: decoder's workers, tokens -> [queue] -> loop

Every random choice (which caption, which window, mirrored or not, which colours) is drawn from (seed, epoch, uid) alone,
so it is the same for any back-end, thread count and number of ranks. A picture that cannot be decoded becomes a grey one
with valid = False, and a row in quarantine.jsonl.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from core import images
from core.errors import ConfigError, ImageError, RunError
from core.metrics import Jsonl, Series
from shardkit.reader import Batch as RawBatch
from shardkit.reader import BatchReader, EpochOrder, Mixture, Sample, ShardSet
from train.colour import random_colour
from train.decode_cpu import Decoder, Picture, View, middle_view, random_view
from train.tokenizer import Tokenizer
from train.towers import trim

STARVED_S = 120.0  # a step that waits so long for the decoder waits for ever
QUEUE_DEPTH = 3  # decoded batches held ready; more only hides for longer that decoding is too slow
FEW_BAD = 16  # so many unreadable pictures never stop a run, whatever share of a small beginning they are
NONE_GOOD = 8  # but so many without a good one between them do: a shard, or the decoder, is broken
MAX_BAD = 0.01  # of all pictures: fewer that are unreadable are left out of the loss, more stop the run
MAX_LANES = 64
GRAY_SHARE = 1 / 8  # pictures without colour, at a strength of 1: what helped Flickr8k (docs/LOG.md)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch."""

    step: int
    pixels_bCSS: Tensor
    """uint8."""
    tokens_bL: Tensor
    """int64, cut behind the longest caption."""
    valid_b: Tensor
    """bool; False where the picture could not be decoded."""
    group_b: Tensor
    """int64, equal for samples of the same picture."""
    uids: list[str]

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        pixels, tokens, valid, group = (
            t if t.device.type == "cuda" else t.pin_memory().to(device, non_blocking=True)
            for t in (self.pixels_bCSS, self.tokens_bL, self.valid_b, self.group_b)
        )
        return Batch(self.step, pixels, tokens, valid, group, self.uids)


@dataclass(frozen=True)
class Plan:
    """Which samples each step of a run holds: a function of the shards and a few numbers, and of no rank count."""

    shard_set: ShardSet
    seed: int
    batch_size: int
    lanes: int
    steps_per_epoch: int
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, shard_set: ShardSet, seed: int, batch_size: int, weights: Sequence[float] = ()) -> Plan:
        """The plan of a run; `weights` mix the sets that `shard_set` was opened from.

        Raises:
            InputError: the shards hold fewer samples than one batch.
            ConfigError: weights that do not fit.
        """
        lanes = max(n for n in range(1, MAX_LANES + 1) if batch_size % n == 0)
        plan = cls(shard_set, seed, batch_size, lanes, 0, tuple(weights))
        return replace(plan, steps_per_epoch=plan.order(0).steps)

    def order(self, epoch: int) -> EpochOrder | Mixture:
        if self.weights:
            sizes = self.shard_set.set_sizes
            return Mixture(sizes, self.weights, self.seed, epoch, self.lanes, self.batch_size)
        return EpochOrder(self.shard_set.shard_sizes, self.seed, epoch, self.lanes, self.batch_size)

    def describe(self) -> str:
        """How well a batch is mixed: shards in one against a perfect draw, or the share of each set."""
        order = self.order(0)
        if isinstance(order, Mixture):
            parts = [
                f"{share / self.batch_size:.1%} (asked for {weight / sum(self.weights):.1%})"
                for share, weight in zip(order.shares, self.weights, strict=True)
            ]
            return f"each batch of {self.batch_size} holds {', '.join(parts)} of the shard sets, in their order"
        seen, expected = order.mixing()
        shards = len(self.shard_set.shards)
        return f"a batch of {self.batch_size} draws from {seen} of {shards} shards (a perfect draw from {expected:.1f})"


Prepared = Callable[[], tuple[Batch, dict[int, str]]]


class ViewOf(Protocol):
    """Chooses the window of a picture and the number of its caption."""

    def __call__(self, sample: Sample, width: int, height: int) -> tuple[View, int]: ...


def middle_of(sample: Sample, width: int, height: int) -> tuple[View, int]:
    """What evaluation looks at: the middle square and the first caption."""
    return middle_view(width, height), 0


@dataclass(frozen=True)
class Augment:
    """Random window, colours and caption of a training epoch, drawn from (seed, epoch, uid)."""

    seed: int
    epoch: int
    crop: float
    flip: bool
    colour: float = 0.0

    def __call__(self, sample: Sample, width: int, height: int) -> tuple[View, int]:
        draw = Random(xxhash.xxh3_64_intdigest(f"{self.seed}/{self.epoch}/{sample.uid}".encode()))
        caption = int(draw.random() * len(sample.captions))
        if self.crop >= 1:
            view = middle_view(width, height)._replace(flip=self.flip and draw.random() < 0.5)
        else:
            view = random_view(width, height, draw, self.crop, self.flip)
        return view._replace(colour=random_colour(draw, self.colour, GRAY_SHARE * self.colour)), caption


@dataclass
class Waits:
    """Seconds at each place where a batch may keep someone waiting; see `Loader`."""

    reader: Series = field(default_factory=Series)
    """The decoder waited for bytes."""
    decode: Series = field(default_factory=Series)
    """The training loop waited for a decoded batch: the only one that costs training time."""
    decode_busy: Series = field(default_factory=Series)
    """One batch held up the next one: decoding and tokenising it, less what was done while the loop was behind."""


class _Begun(NamedTuple):
    """A batch that is being decoded, and the seconds that beginning it took."""

    raw: RawBatch
    finish: Prepared
    seconds: float


class Preparer:
    """Samples to a batch: headers, windows, decoded pixels, tokens, masks."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, context: int) -> None:
        self.decoder, self.tokenizer, self.context = decoder, tokenizer, context

    def prepare(self, step: int, samples: list[Sample], view_of: ViewOf) -> tuple[Batch, dict[int, str]]:
        """The batch, and the reason of each position whose picture is bad."""
        return self.begin(step, samples, view_of)()

    def begin(self, step: int, samples: list[Sample], view_of: ViewOf) -> Prepared:
        """`prepare` begun, to be finished by calling the result, before which the next one may be begun."""
        pictures: list[Picture | None] = []
        captions: list[str] = []
        reasons = {i: sample.reason for i, sample in enumerate(samples) if not sample.ok}
        for i, sample in enumerate(samples):
            picture, caption = (None, 0) if i in reasons else self._look_at(i, sample, view_of, reasons)
            pictures.append(picture)
            captions.append(sample.captions[caption] if sample.captions else "")
        decoded = self.decoder.begin(pictures)

        def finish() -> tuple[Batch, dict[int, str]]:
            tokens = self.tokens(captions)
            pixels, undecoded = decoded()
            bad = reasons | undecoded
            valid = torch.ones(len(samples), dtype=torch.bool)
            valid[list(bad)] = False
            group = torch.tensor([s.image_group for s in samples], dtype=torch.int64)
            return Batch(step, pixels, tokens, valid, group, [s.uid for s in samples]), bad

        return finish

    def tokens(self, captions: list[str]) -> Tensor:
        """int64 (b, L), cut behind the longest."""
        return trim(torch.from_numpy(self.tokenizer.encode(captions, self.context))).long().contiguous()

    def _look_at(self, i: int, sample: Sample, view_of: ViewOf, reasons: dict[int, str]) -> tuple[Picture | None, int]:
        try:
            header = images.read_header(sample.data)
        except ImageError as error:
            reasons[i] = error.detail
            return None, 0
        view, caption = view_of(sample, header.width, header.height)
        return Picture(sample.data, header, view), caption


class Quarantine:
    """Bad pictures of one rank: a row each, once, and the end of the run when they are too many."""

    def __init__(self, path: Path, rank: int, max_share: float = MAX_BAD) -> None:
        self.file, self.rank, self.max_share = Jsonl(path), rank, max_share
        self.seen = self.bad = self._without_good = 0
        self._known = {row["uid"] for row in self.file.rows()}

    def note(self, batch: Batch, samples: list[Sample], reasons: dict[int, str]) -> None:
        """Count a batch and write down its bad pictures.

        Raises:
            RunError: nothing of the latest batches was readable, or more than `max_share` of everything so far was not.
        """
        self.seen += len(samples)
        self.bad += len(reasons)
        # Counted over batches, because a rank's share may be a picture or two, and one bad picture must not end a run.
        self._without_good = self._without_good + len(samples) if len(reasons) == len(samples) else 0
        for i, reason in reasons.items():
            sample = samples[i]
            if sample.uid not in self._known:
                self._known.add(sample.uid)
                row = {"uid": sample.uid, "key": sample.key, "shard": sample.shard, "reason": reason}
                self.file.append({**row, "step": batch.step, "rank": self.rank})
        if self._without_good >= NONE_GOOD or self.bad > max(FEW_BAD, self.max_share * self.seen):
            raise RunError(
                f"{self.bad} of {self.seen} pictures could not be decoded (limit {self.max_share:.2%}; the last reason: "
                f"{next(iter(reasons.values()), '')}); see {self.file.path} and run `pairmill verify --deep`"
            )


class Loader:
    """Batches of one rank from global step `start` to `stop`, over as many epochs as that takes.

    Iterate over it inside `with`. A fault in a thread is raised where its batch would have been delivered.
    """

    def __init__(
        self,
        plan: Plan,
        preparer: Preparer,
        quarantine: Quarantine,
        *,
        rank: int,
        ranks: int,
        start: int,
        stop: int,
        crop: float,
        flip: bool,
        colour: float = 0.0,
        starved_s: float = STARVED_S,
    ) -> None:
        if plan.batch_size % ranks:
            raise ConfigError(f"batch_size {plan.batch_size} cannot be shared equally by {ranks} ranks; change either.")
        self.plan, self.preparer, self.quarantine = plan, preparer, quarantine
        self.rank, self.ranks, self.start, self.stop = rank, ranks, start, stop
        self.crop, self.flip, self.colour, self.starved_s = crop, flip, colour, starved_s
        self.waits = Waits()
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(QUEUE_DEPTH)
        self._closed = threading.Event()
        self._begun: RawBatch | None = None  # what is being decoded now
        self._starved = False
        self._thread = threading.Thread(target=self._work, name="prepare", daemon=True)

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        while (
            self._thread.is_alive() and not self._starved
        ):  # make room, because the thread may stand before a full queue
            self._drain()
            self._thread.join(timeout=0.05)
        self._drain()

    @property
    def ready(self) -> int:
        """Decoded batches that wait for the loop."""
        return self._queue.qsize()

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.start, self.stop):
            with self.waits.decode.timed():
                item = self._take()
            if isinstance(item, BaseException):
                raise item
            yield item

    def _take(self) -> Batch | BaseException:
        """The next item. The reader raises its own starvation through the queue, so that of the decoder is meant here."""
        while True:
            at = self._begun
            try:
                return self._queue.get(timeout=self.starved_s)
            except queue.Empty:
                self._starved = self._begun is at and at is not None
                if self._starved and at is not None:
                    return RunError(
                        f"rank {self.rank} starved in stage decode: step {at.step} was not decoded within "
                        f"{self.starved_s:g} s, its samples are of {', '.join(sorted({s.shard for s in at.samples}))}; "
                        "look at those with `pairmill verify --deep`, then resume"
                    )

    def _work(self) -> None:
        try:
            for batch in self._batches():
                if not self._put(batch):
                    return
        except BaseException as error:  # crosses to the loop's thread, where it is raised
            self._put(error)

    def _batches(self) -> Iterator[Batch]:
        """Decoded batches; where the reader keeps up, each is finished after the next one has been begun."""
        begun = deque[_Begun]()
        steps_per_epoch = self.plan.steps_per_epoch
        for epoch in range(self.start // steps_per_epoch, -(-self.stop // steps_per_epoch)):
            first = epoch * steps_per_epoch
            begin = max(0, self.start - first)
            view_of = Augment(self.plan.seed, epoch, self.crop, self.flip, self.colour)
            with BatchReader(self.plan.shard_set, self.plan.order(epoch), self.rank, self.ranks, begin) as reader:
                batches = iter(reader)
                for step in range(first + begin, min(self.stop, first + steps_per_epoch)):
                    if len(begun) > 1 or (begun and not reader.ready):
                        yield self._finish(begun.popleft())
                    with self.waits.reader.timed():
                        raw = next(batches)
                    self._begun, start = raw, time.perf_counter()
                    finish = self.preparer.begin(step, raw.samples, view_of)
                    begun.append(_Begun(raw, finish, time.perf_counter() - start))
                    self._begun = None
        while begun:
            yield self._finish(begun.popleft())

    def _finish(self, begun: _Begun) -> Batch:
        raw, start = begun.raw, time.perf_counter()
        self._begun = raw
        batch, reasons = begun.finish()
        self._begun = None
        self.waits.decode_busy.add(begun.seconds + time.perf_counter() - start)
        self.quarantine.note(batch, raw.samples, reasons)
        return batch

    def _put(self, item: Batch | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _drain(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()


def make_decoder(kind: str, size: int, workers: int, batch: int, device: torch.device) -> Decoder:
    """The decoder that `--decode` names; `auto` takes DALI where there is a GPU and the package."""
    from train.decode_cpu import CpuDecoder
    from train.decode_dali import DaliDecoder, dali_installed

    if kind == "dali" or (kind == "auto" and device.type == "cuda" and dali_installed()):
        return DaliDecoder(size, workers, batch, device)
    return CpuDecoder(size, workers)

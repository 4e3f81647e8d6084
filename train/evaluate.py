"""What a checkpoint can do: retrieval among captioned pictures, zero-shot classification of class folders. STAGE `eval`.

Shape letters: N pictures, M captions (several a picture), E joint width, c a chunk of either, K classes.

Figures: `t2i_r5` is the share of captions whose picture is among the five nearest pictures; `i2t_r5` the share of
pictures with any of their captions among the five nearest captions. A tie counts against the right answer, so a model
that maps everything to one point scores nothing, nor does one whose numbers are no longer finite.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from core import images
from core.errors import ConfigError, InputError, RunError
from core.metrics import Jsonl
from core.runner import cores
from core.storage import Folder
from shardkit.reader import Sample, ShardSet
from train.config import EvalConfig
from train.data import STARVED_S, Batch, Preparer, make_decoder, middle_of
from train.distributed import World, choose_device, choose_precision, gather_rows
from train.export import load_weights, run_folder
from train.models import ModelConfig
from train.tokenizer import Tokenizer
from train.towers import CLIP

log = logging.getLogger("pairmill.train")

EVAL_BATCH = 250
RANKS = (1, 5, 10)
CHUNK_ENTRIES = 1 << 25  # similarities held at a time: 128 MB, whatever the size of the set
EXAMPLES, TOP, THUMB = 12, 5, 160
TEMPLATES_FILE = "templates.txt"
TEMPLATES = (
    "{}",
    "a photo of a {}.",
    "a picture of the {}.",
    "an image with {} in it.",
    "a close-up photo of a {}.",
    "a small, blurry photo of a {}.",
    "one {} in the middle of the picture.",
)


class Embedded(NamedTuple):
    """A captioned set in the joint space; only pictures that could be decoded, and their captions."""

    img_NE: Tensor
    txt_ME: Tensor
    owner_M: Tensor
    """Row of each caption's picture; ascending."""
    index_N: list[int]
    """Number of each picture in its ShardSet."""
    captions: list[str]


# -- embedding ---------------------------------------------------------------------------------------------------------


def embed(model: CLIP, preparer: Preparer, shard_set: ShardSet, ranks: World, batch: int = EVAL_BATCH) -> Embedded:
    """Embed all pictures and all captions of a set; the work is shared over the ranks, all of them get the result."""
    model.eval()
    mine = _dealt(len(shard_set), ranks)
    parts = [mine[i : i + batch] for i in range(0, len(mine), batch)]
    images_nE, valid_n = embed_images(model, preparer, map(shard_set.read, parts), ranks.device)
    img_NE = _gathered(images_nE, len(shard_set), ranks)
    valid = _gathered(valid_n, len(shard_set), ranks)
    index = torch.arange(len(shard_set))[valid.cpu()].tolist()
    if len(index) < len(shard_set):
        log.warning("evaluation leaves out %d pictures that cannot be decoded", len(shard_set) - len(index))
    captions = [shard_set.captions(i) for i in index]
    flat = [caption for some in captions for caption in some]
    owner = torch.tensor([row for row, some in enumerate(captions) for _ in some], dtype=torch.int64)
    txt_ME = _embed_shared(model, preparer, flat, ranks, batch)
    return Embedded(img_NE[valid], txt_ME, owner.to(ranks.device), index, flat)


def _embed_shared(model: CLIP, preparer: Preparer, texts: Sequence[str], ranks: World, batch: int) -> Tensor:
    """`embed_texts` with the work shared over the ranks; all of them get the result."""
    own = embed_texts(model, preparer, [texts[i] for i in _dealt(len(texts), ranks)], ranks.device, batch)
    return _gathered(own, len(texts), ranks)


def _dealt(total: int, ranks: World) -> np.ndarray:
    """Numbers of this rank's items, dealt in turn. All ranks get equally many, so some get one twice: a sharded model is
    put together anew for each batch, by all ranks at once."""
    most = -(-total // ranks.size)
    return np.arange(ranks.rank, most * ranks.size, ranks.size) % max(1, total)


@torch.no_grad()  # inference_mode would spoil the parameters that FSDP puts together
def embed_images(
    model: CLIP, preparer: Preparer, parts: Iterator[list[Sample]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Embeddings (n, E) in fp32, and bool (n,): could be decoded. The next part is read and decoded meanwhile."""
    rows: list[Tensor] = [torch.zeros(0, model.cfg.embed_dim, device=device)]
    valid: list[Tensor] = [torch.zeros(0, dtype=torch.bool, device=device)]
    for batch in _ahead(preparer, parts):
        rows.append(model.encode_image(batch.pixels_bCSS.to(device)).float())
        valid.append(batch.valid_b.to(device))
    return torch.cat(rows), torch.cat(valid)


@torch.no_grad()
def embed_texts(
    model: CLIP, preparer: Preparer, texts: Sequence[str], device: torch.device, batch: int = EVAL_BATCH
) -> Tensor:
    """Embeddings (n, E) in fp32, in the order of `texts`; embedded by length, because a batch costs its longest."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    out = torch.zeros(len(texts), model.cfg.embed_dim, device=device)
    for i in range(0, len(order), batch):
        part = order[i : i + batch]
        out[part] = model.encode_text(preparer.tokens([texts[j] for j in part]).to(device)).float()
    return out


def _ahead(preparer: Preparer, parts: Iterator[list[Sample]]) -> Iterator[Batch]:
    """Prepared parts in order, the next one always being read and decoded in a thread.

    Raises:
        RunError: a part was not ready within `STARVED_S`.
    """
    begun: list[Sample] = []

    def prepare_next() -> Batch | None:
        samples = next(parts, None)
        if samples is None:
            return None
        begun[:] = samples
        return preparer.prepare(0, samples, middle_of)[0]

    with ThreadPool(1) as pool:  # of daemon threads: one that hangs in a picture must not outlive the run
        waiting = pool.apply_async(prepare_next)
        while (batch := _within(STARVED_S, waiting, begun)) is not None:
            waiting = pool.apply_async(prepare_next)
            yield batch


def _within(seconds: float, waiting: AsyncResult[Batch | None], begun: list[Sample]) -> Batch | None:
    waiting.wait(seconds)
    if not waiting.ready():
        shards = ", ".join(sorted({sample.shard for sample in begun}))
        raise RunError(
            f"evaluation starved: pictures of {shards or 'the set'} were not read and decoded within {seconds:g} s; look at "
            "them with `pairmill verify --deep`"
        )
    return waiting.get()


def _gathered(own_n: Tensor, total: int, ranks: World) -> Tensor:
    """Rows that were dealt out in turn (row i on rank i mod N), together again on every rank."""
    if ranks.size == 1:
        return own_n
    most = -(-total // ranks.size)
    kind = own_n.dtype
    padded = own_n.to(torch.uint8) if kind == torch.bool else own_n
    padded = torch.cat([padded, padded.new_zeros(most - len(padded), *padded.shape[1:])])
    dealt = gather_rows(padded).view(ranks.size, most, *padded.shape[1:]).transpose(0, 1)
    return dealt.reshape(ranks.size * most, *padded.shape[1:])[:total].to(kind)


# -- retrieval ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def recalls(
    img_NE: Tensor, txt_ME: Tensor, owner_M: Tensor, entries: int = CHUNK_ENTRIES, ranks: World | None = None
) -> dict[str, float]:
    """Recall at 1, 5 and 10 in both directions, of normalised embeddings; `owner_M` must be ascending.

    Holds at most `entries` similarities at a time. With `ranks` each compares its share, and all must call it.
    """
    ranks = ranks or World(0, 1, 0, img_NE.device)
    rows_N = torch.arange(len(img_NE), device=img_NE.device)
    texts, pictures = (torch.from_numpy(_dealt(n, ranks)).to(img_NE.device) for n in (len(txt_ME), len(img_NE)))
    by_text = _chunks(txt_ME[texts], owner_M[texts], len(img_NE), entries)
    by_image = _chunks(img_NE[pictures], rows_N[pictures], len(txt_ME), entries)
    text_rank = torch.cat([_rank_of_own(t, img_NE, o) for t, o in by_text])
    image_rank = torch.cat([_rank_of_best(i, txt_ME, owner_M, r) for i, r in by_image])
    text_rank = _gathered(text_rank, len(txt_ME), ranks)
    image_rank = _gathered(image_rank, len(img_NE), ranks)
    found = {f"t2i_r{k}": float((text_rank < k).double().mean()) for k in RANKS}
    return found | {f"i2t_r{k}": float((image_rank < k).double().mean()) for k in RANKS}


def _chunks(rows: Tensor, beside: Tensor, width: int, entries: int) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, entries // max(1, width))
    return zip(rows.split(size), beside.split(size), strict=True)


def _rank_of_own(txt_cE: Tensor, img_NE: Tensor, owner_c: Tensor) -> Tensor:
    """How many other pictures are at least as near to each caption as its own (or classes to a picture as its own)."""
    similarity_cN = txt_cE @ img_NE.T
    own_c1 = similarity_cN.gather(1, owner_c[:, None])
    return _not_below(similarity_cN, own_c1) - 1


def _rank_of_best(img_cE: Tensor, txt_ME: Tensor, owner_M: Tensor, row_c: Tensor) -> Tensor:
    """How many captions of others are at least as near to each picture as the nearest of its own."""
    similarity_cM = img_cE @ txt_ME.T
    # its own captions stand side by side, so only those columns are looked at twice
    first_c, end_c = torch.searchsorted(owner_M, row_c), torch.searchsorted(owner_M, row_c, right=True)
    own = slice(int(first_c.min()), int(end_c.max()))
    own_ck = owner_M[None, own] == row_c[:, None]
    best_c1 = similarity_cM[:, own].masked_fill(~own_ck, -torch.inf).amax(dim=1, keepdim=True)
    return _not_below(similarity_cM, best_c1) - (own_ck & ~(similarity_cM[:, own] < best_c1)).sum(dim=1)


def _not_below(similarity_cN: Tensor, own_c1: Tensor) -> Tensor:
    """How many of each row are at least as near. Not `>=`, which is false of NaN: a model that broke would rank every right
    answer first."""
    below = similarity_cN < own_c1
    if below.device.type != "cpu":
        return below.shape[1] - below.sum(dim=1)
    # torch sums bools on a CPU at 5 ns each, after which nothing else of retrieval would count
    return torch.tensor([below.shape[1] - np.count_nonzero(row) for row in below.numpy()], dtype=torch.int64)


# -- zero-shot classification ------------------------------------------------------------------------------------------


def zero_shot(
    model: CLIP,
    preparer: Preparer,
    folder: str,
    templates: Sequence[str],
    ranks: World,
    batch: int = EVAL_BATCH,
) -> dict[str, Any]:
    """Classify the pictures of class folders by the nearest class name, each in all templates; ties as in retrieval.

    The work is shared over the ranks, all of which must call it.

    Returns accuracy, top5 (more than five classes), chance, classes, pictures, unreadable, per_class{name: accuracy}.

    Raises:
        InputError: fewer than two class folders with files.
    """
    names, files = class_folders(folder)
    model.eval()
    classes_KE = _classifier(model, preparer, [name.replace("_", " ") for name in names], templates, ranks, batch)
    mine = [files[i] for i in _dealt(len(files), ranks)]
    parts = [mine[i : i + batch] for i in range(0, len(mine), batch)]
    samples = ([_sample_of(path, label) for path, label in part] for part in parts)
    img_nE, valid_n = embed_images(model, preparer, samples, ranks.device)
    img_NE, valid_N = (_gathered(x, len(files), ranks) for x in (img_nE, valid_n))
    label_N = torch.tensor([label for _, label in files], device=ranks.device)[valid_N]
    if not len(label_N):
        raise InputError(f"expected pictures in the class folders of {folder}, found none that can be decoded")
    rank_N = _rank_of_own(img_NE[valid_N], classes_KE, label_N)
    right_N = (rank_N < 1).double()
    per_class = {name: float(right_N[label_N == k].mean()) for k, name in enumerate(names)}
    found = {
        "accuracy": float(right_N.mean()),
        "chance": 1 / len(names),
        "classes": len(names),
        "pictures": len(label_N),
        "unreadable": len(files) - len(label_N),
        "per_class": {name: value for name, value in per_class.items() if value == value},
    }
    if len(names) > 5:
        found["top5"] = float((rank_N < 5).double().mean())
    return found


def _classifier(
    model: CLIP, preparer: Preparer, names: list[str], templates: Sequence[str], ranks: World, batch: int
) -> Tensor:
    """One direction a class (K, E): the mean over templates of the normalised text embeddings, normalised."""
    texts = [template.replace("{}", name) for name in names for template in templates]
    txt = _embed_shared(model, preparer, texts, ranks, batch).view(len(names), len(templates), -1)
    return F.normalize(txt.mean(dim=1), dim=-1)


def class_folders(folder: str) -> tuple[list[str], list[tuple[Path, int]]]:
    """Class names in order, and every file with its class's number."""
    root = Path(folder)
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and p.name[0] != ".") if root.is_dir() else []
    listed = [(n, sorted(p for p in (root / n).iterdir() if p.is_file() and p.name[0] != ".")) for n in names]
    filled = [(n, paths) for n, paths in listed if paths]
    if len(filled) < 2:
        raise InputError(
            f"expected at least two class folders with pictures in {folder}, found {len(filled)}; lay them out as "
            "FOLDER/CLASS/picture.jpg"
        )
    return [n for n, _ in filled], [(path, k) for k, (_, paths) in enumerate(filled) for path in paths]


def _sample_of(path: Path, label: int) -> Sample:
    return Sample(path.read_bytes(), [""], str(path), label, path.stem, path.parent.name, 0, 0, 0)


def read_templates(folder: str) -> Sequence[str]:
    """The lines of FOLDER/templates.txt, each with `{}` in it; the general ones where there is no such file.

    Raises:
        InputError: a file that holds something else.
    """
    path = Path(folder) / TEMPLATES_FILE
    if not path.exists():
        return TEMPLATES
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise InputError(f"expected a file of templates at {path}, found none ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"expected a file of templates in UTF-8 at {path}, found other bytes ({error.reason})"
        ) from error
    templates = [line for line in lines if line]
    if not templates or any("{}" not in line for line in templates):
        raise InputError(f"expected a line with {{}} for each template in {path}, found {len(templates)} lines")
    return templates


# -- examples for people ----------------------------------------------------------------------------------------------


def pick_examples(embedded: Embedded, shard_set: ShardSet) -> dict[str, Any]:
    """Some pictures with the captions nearest to them, some captions with the pictures nearest to them.

    {"images": [{uid, jpeg (base64), captions[…], top[{caption, score, right}]}],
     "texts": [{caption, top[{uid, jpeg, score, right}]}]}
    """
    rows = _spread(len(embedded.img_NE), EXAMPLES)
    found_images = []
    for row, near in zip(rows, _nearest(embedded.img_NE[rows], embedded.txt_ME), strict=True):
        own = (embedded.owner_M == row).nonzero().flatten().tolist()
        top = [{"caption": embedded.captions[i], "score": s, "right": i in own} for i, s in near]
        captions = [embedded.captions[i] for i in own]
        found_images.append({**_thumbnail(shard_set, embedded.index_N[row]), "captions": captions, "top": top})
    texts = _spread(len(embedded.captions), EXAMPLES // 2)
    found_texts = []
    for text, near in zip(texts, _nearest(embedded.txt_ME[texts], embedded.img_NE), strict=True):
        owner = int(embedded.owner_M[text])
        top = [{**_thumbnail(shard_set, embedded.index_N[i]), "score": s, "right": i == owner} for i, s in near]
        found_texts.append({"caption": embedded.captions[text], "top": top})
    return {"images": found_images, "texts": found_texts}


def _spread(total: int, wanted: int) -> list[int]:
    return [i * total // min(total, wanted) for i in range(min(total, wanted))]


def _nearest(rows_cE: Tensor, others_E: Tensor) -> list[list[tuple[int, float]]]:
    values, at = (rows_cE @ others_E.T).topk(min(TOP, len(others_E)), dim=1)
    pairs = zip(at.tolist(), values.tolist(), strict=True)
    return [[(i, round(s, 4)) for i, s in zip(row, scores, strict=True)] for row, scores in pairs]


def _thumbnail(shard_set: ShardSet, index: int) -> dict[str, str]:
    sample = shard_set.read(np.array([index]))[0]
    pixels = images.decode(sample.data, images.read_header(sample.data))
    jpeg = images.encode_jpeg(images.resize(pixels, THUMB), 80)
    return {"uid": sample.uid, "jpeg": base64.b64encode(jpeg).decode()}


# -- during training ---------------------------------------------------------------------------------------------------


class Evaluator:
    """Retrieval on a captioned set and classification of class folders, at any step of a run.

    Rows go to `file` (eval.jsonl), examples to examples.json.
    """

    def __init__(
        self, ranks: World, home: Path, model: CLIP, preparer: Preparer, val: str, batch: int, classes: str = "",
        file: Jsonl | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.home, self.model, self.preparer, self.batch = ranks, home, model, preparer, batch
        self.file = file or Jsonl(home / "eval.jsonl")
        self.shard_set = ShardSet.open(val) if val else None
        self.classes, self.templates = classes, read_templates(classes) if classes else TEMPLATES
        if classes:
            class_folders(classes)  # what is wrong with them is said before the first step

    def run(self, step: int, *, examples: bool, more: dict[str, Any] | None = None) -> dict[str, Any]:
        """Measure now. Every rank must call it; returns {"retrieval": {…}, "zero_shot": {…}}, of which it has sets."""
        found: dict[str, Any] = {}
        start = time.perf_counter()
        if self.shard_set is not None:
            embedded = embed(self.model, self.preparer, self.shard_set, self.ranks, self.batch)
            if not embedded.captions:
                raise RunError(f"no picture of {self.shard_set.folder} could be decoded; run `pairmill verify --deep`")
            found["retrieval"] = {
                **recalls(embedded.img_NE, embedded.txt_ME, embedded.owner_M, ranks=self.ranks),
                "images": len(embedded.img_NE),
                "captions": len(embedded.captions),
            }
            if examples and self.ranks.main:
                write_examples(self.home, step, pick_examples(embedded, self.shard_set))
        if self.classes:
            found["zero_shot"] = zero_shot(
                self.model, self.preparer, self.classes, self.templates, self.ranks, self.batch
            )
        found |= more or {}
        if found and self.ranks.main:
            seconds = time.perf_counter() - start
            self.file.append({"step": step, **found, "seconds": seconds, "time": time.time()})
        return found


def write_examples(home: Path, step: int, found: dict[str, Any]) -> None:
    Folder(home).write("examples.json", json.dumps({"step": step, **found}).encode())


def val_folder(work: str, val: str) -> str:
    """The retrieval set that `--val` names; empty where there is none."""
    if val == "none":
        return ""
    if val:
        return val
    return f"{work}/holdout" if Folder(work).exists("holdout/shards.json") else ""


# -- the stage ---------------------------------------------------------------------------------------------------------


def run(config: EvalConfig) -> dict[str, Any]:
    """Measure a checkpoint.

    Returns `step`, `checkpoint`, `retrieval` (with a set), `zero_shot` (with class folders).
    """
    home = Path(run_folder(config.work, config.name))
    weights = load_weights(config.checkpoint or str(home), config.model)
    if weights.shape is None:
        raise ConfigError(f"{weights.source} does not say which model it is of; name it with --model")
    val = val_folder(config.work, config.val)
    if not val and not config.zero_shot:
        raise ConfigError("there is nothing to measure on: name shards with --val or class folders with --zero-shot")
    device = choose_device(config.device, 0)
    Folder(home).make()  # before the work, and not after it
    model = CLIP(weights.shape, choose_precision(config.precision, device), logit_bias="logit_bias" in weights.state)
    weights.into(model)
    model.to(device)
    with _preparer(weights.shape, device) as preparer:
        evaluator = Evaluator(World(0, 1, 0, device), home, model, preparer, val, EVAL_BATCH, config.zero_shot)
        step = int(weights.meta.get("step", 0))
        found = evaluator.run(step, examples=True, more={"checkpoint": weights.source})
    return {"step": step, **found}


@contextlib.contextmanager
def _preparer(shape: ModelConfig, device: torch.device) -> Iterator[Preparer]:
    decoder = make_decoder("auto", shape.image_size, cores(), EVAL_BATCH, device)
    with contextlib.closing(decoder):
        yield Preparer(decoder, Tokenizer(), shape.context)

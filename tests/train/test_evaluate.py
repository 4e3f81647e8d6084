"""Retrieval and zero-shot figures against brute force, on one process and on several."""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from core.errors import ConfigError, InputError, RunError, StorageError
from core.images import decode, encode_jpeg, read_header
from shardkit.reader import ShardSet
from tests.train.ranks import Ranks
from tests.train.shards import COLOURS, make_work, photograph
from train import checkpoint
from train.config import EvalConfig
from train.data import Preparer
from train.decode_cpu import CpuDecoder, Decoded, Decoder, Picture, middle_view, render
from train.distributed import World
from train.evaluate import (
    TEMPLATES,
    TEMPLATES_FILE,
    Embedded,
    Evaluator,
    class_folders,
    embed,
    pick_examples,
    read_templates,
    recalls,
    run,
    val_folder,
    zero_shot,
)
from train.models import model_config
from train.optim import make_optimizer
from train.tokenizer import Tokenizer
from train.towers import CLIP

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, CPU)
SHAPE = model_config("test-32")


def make_model() -> CLIP:
    torch.manual_seed(1)
    return CLIP(SHAPE)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, a holdout of 15 pictures with 30 captions, a checkpoint, and class folders."""
    work = make_work(tmp_path_factory.mktemp("evaluate"), 60, holdout_every=4)
    model = make_model()
    meta = {"model": dataclasses.asdict(SHAPE), "data": "d"}
    checkpoint.save(work / "runs/main/checkpoints", 7, model, make_optimizer(model, 1e-3), meta)
    for k, colour in enumerate(COLOURS):
        (work / "classes" / f"plain_{colour}").mkdir(parents=True)
        for n in range(3 + k):
            pixels = (photograph(n, 48, 48) // 4 + np.array(COLOURS[colour]) // 2).astype(np.uint8)
            (work / "classes" / f"plain_{colour}" / f"{n}.jpg").write_bytes(encode_jpeg(pixels, 90))
    return work


@pytest.fixture(scope="module")
def preparer() -> Iterator[Preparer]:
    with closing(CpuDecoder(SHAPE.image_size, 2)) as decoder:
        yield Preparer(decoder, Tokenizer(), SHAPE.context)


def brute_force(img: np.ndarray, txt: np.ndarray, owner: list[int]) -> dict[str, float]:
    """The definition, one query at a time: whoever is at least as near as the right answer stands before it."""
    found = {}
    for k in (1, 5, 10):
        hits = 0
        for m, own in enumerate(owner):
            scores = img @ txt[m]
            hits += sum(scores[n] >= scores[own] for n in range(len(img)) if n != own) < k
        found[f"t2i_r{k}"] = hits / len(owner)
        hits = 0
        for n in range(len(img)):
            scores = txt @ img[n]
            best = max(scores[m] for m, own in enumerate(owner) if own == n)
            hits += sum(scores[m] >= best for m, own in enumerate(owner) if own != n) < k
        found[f"i2t_r{k}"] = hits / len(img)
    return found


@pytest.mark.parametrize("entries", [1, 50, 1 << 20])
def test_recalls_equal_brute_force(entries: int) -> None:
    rng = np.random.default_rng(0)
    owner = sorted([*range(23), *rng.integers(0, 23, 30).tolist()])  # one to several captions a picture
    img = rng.integers(-2, 3, (23, 4)).astype(np.float32)  # small integers: sums are exact, and ties are many
    txt = (img[owner] + rng.integers(-1, 2, (len(owner), 4))).astype(np.float32)
    found = recalls(torch.from_numpy(img), torch.from_numpy(txt), torch.tensor(owner), entries)
    assert found == pytest.approx(brute_force(img, txt, owner))
    assert 0 < found["t2i_r1"] < found["t2i_r10"] < 1  # the figures are not all the same, so they can be wrong


def test_a_model_that_maps_everything_to_one_point_scores_nothing() -> None:
    one = F.normalize(torch.ones(20, 8), dim=1)
    assert set(recalls(one, one, torch.arange(20)).values()) == {0.0}
    broken = torch.full((20, 8), torch.nan)
    assert set(recalls(broken, one, torch.arange(20)).values()) == {0.0}
    eye = torch.eye(20)
    assert set(recalls(eye, eye, torch.arange(20)).values()) == {1.0}


def test_embeddings_are_those_of_each_picture_and_caption_alone(work: Path, preparer: Preparer) -> None:
    shard_set, model = ShardSet.open(work / "holdout"), make_model().eval()
    found = embed(model, preparer, shard_set, ALONE, batch=4)
    assert found.img_NE.shape == (15, SHAPE.embed_dim) and found.txt_ME.shape == (30, SHAPE.embed_dim)
    assert found.owner_M.tolist() == [i for i in range(15) for _ in range(2)]
    assert found.captions == [c for i in range(15) for c in shard_set.captions(i)]
    with torch.no_grad():
        for m in (0, 7, 29):
            alone = model.encode_text(preparer.tokens([found.captions[m]]))[0]
            assert torch.allclose(found.txt_ME[m], alone, atol=1e-5)
        pixels = middle_of_file(shard_set.read(np.array([11]))[0].data)
        assert torch.allclose(found.img_NE[11], model.encode_image(pixels[None])[0], atol=1e-5)


def middle_of_file(data: bytes) -> torch.Tensor:
    header = read_header(data)
    return render(Picture(data, header, middle_view(header.width, header.height)), SHAPE.image_size)


def _embed_here(work: str) -> Embedded:
    import torch.distributed as dist

    ranks = World(dist.get_rank(), dist.get_world_size(), 0, CPU)
    with closing(CpuDecoder(SHAPE.image_size, 1)) as decoder:
        return embed(make_model(), Preparer(decoder, Tokenizer(), SHAPE.context), ShardSet.open(work), ranks, batch=4)


def _measure_here(work: str, classes: str) -> dict[str, Any]:
    import torch.distributed as dist

    ranks = World(dist.get_rank(), dist.get_world_size(), 0, CPU)
    with closing(CpuDecoder(SHAPE.image_size, 1)) as decoder:
        preparer = Preparer(decoder, Tokenizer(), SHAPE.context)
        evaluator = Evaluator(ranks, Path(work).parent / "measured", make_model(), preparer, work, 4, classes=classes)
        return evaluator.run(3, examples=False)


def test_ranks_share_the_work_and_get_the_same_embeddings(work: Path, preparer: Preparer) -> None:
    alone = embed(make_model(), preparer, ShardSet.open(work / "holdout"), ALONE)
    figures = Evaluator(
        ALONE, work / "alone", make_model(), preparer, str(work / "holdout"), 4, classes=str(work / "classes")
    ).run(3, examples=False)
    assert set(figures) == {"retrieval", "zero_shot"}
    with Ranks(2) as ranks:  # 15 pictures: one rank has 8, the other 7
        for part in ranks.run(_embed_here, str(work / "holdout")):
            assert torch.allclose(part.img_NE, alone.img_NE, atol=1e-5)
            assert torch.allclose(part.txt_ME, alone.txt_ME, atol=1e-5)
            assert part.index_N == alone.index_N and torch.equal(part.owner_M, alone.owner_M)
        assert ranks.run(_measure_here, str(work / "holdout"), str(work / "classes")) == [figures] * 2


def test_an_unreadable_picture_is_left_out_with_its_captions(tmp_path: Path, preparer: Preparer) -> None:
    whole = encode_jpeg(photograph(1), 90)
    work = make_work(tmp_path, 12, bad={5: whole[: len(whole) // 2]})
    found = embed(make_model(), preparer, ShardSet.open(work / "shards"), ALONE)
    assert len(found.img_NE) == 11 and len(found.captions) == 22 and len(found.index_N) == 11
    assert not any("number 5" in caption for caption in found.captions)
    assert found.owner_M.tolist() == [i for i in range(11) for _ in range(2)]


def test_a_decoder_that_never_answers_ends_an_evaluation(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Decoder):
        go = threading.Event()

        def begin(self, pictures: object) -> Callable[[], Decoded]:
            self.go.wait(60)
            return lambda: (torch.zeros(4, 3, SHAPE.image_size, SHAPE.image_size, dtype=torch.uint8), {})

        def close(self) -> None: ...

    monkeypatch.setattr("train.evaluate.STARVED_S", 0.2)
    started = time.monotonic()
    with pytest.raises(RunError, match=r"pictures of 0000\d\.tar were not read and decoded within 0\.2 s"):
        embed(
            make_model(), Preparer(Stuck(), Tokenizer(), SHAPE.context), ShardSet.open(work / "holdout"), ALONE, batch=4
        )
    assert time.monotonic() - started < 30
    Stuck.go.set()


def test_zero_shot_equals_classifying_one_picture_at_a_time(work: Path, preparer: Preparer) -> None:
    model, templates = make_model().eval(), ["a photo of a {}.", "{}"]
    found = zero_shot(model, preparer, str(work / "classes"), templates, ALONE, batch=5)
    names = sorted(p.name for p in (work / "classes").iterdir())
    right = total = 0
    with torch.no_grad():
        texts = [[t.replace("{}", name.replace("_", " ")) for t in templates] for name in names]
        classes = torch.stack([F.normalize(model.encode_text(preparer.tokens(t)).mean(0), dim=0) for t in texts])
        for k, name in enumerate(names):
            for path in (work / "classes" / name).iterdir():
                img = model.encode_image(middle_of_file(path.read_bytes())[None])[0]
                right += int((classes @ img).argmax()) == k
                total += 1
    assert found["accuracy"] == pytest.approx(right / total)
    assert (found["classes"], found["chance"], found["pictures"], found["unreadable"]) == (4, 0.25, total, 0)
    assert set(found["per_class"]) == set(names)


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_broken_model_classifies_nothing_rightly(work: Path, preparer: Preparer, value: float) -> None:
    model = make_model()
    with torch.no_grad():
        model.visual.proj.fill_(value)
    found = zero_shot(model, preparer, str(work / "classes"), ["{}"], ALONE)
    assert found["accuracy"] == 0.0 and set(found["per_class"].values()) == {0.0}


def test_what_a_file_browser_leaves_behind_is_no_class(tmp_path: Path) -> None:
    for name in ("cat", "dog", ".thumbnails", "empty"):
        (tmp_path / name).mkdir()
        for file in () if name == "empty" else ("1.jpg", ".DS_Store"):
            (tmp_path / name / file).touch()
    (tmp_path / "README.txt").touch()
    names, files = class_folders(str(tmp_path))
    assert names == ["cat", "dog"]
    assert [(path.name, label) for path, label in files] == [("1.jpg", 0), ("1.jpg", 1)]


def test_examples_show_the_nearest_and_open_as_jpeg(work: Path, preparer: Preparer) -> None:
    shard_set = ShardSet.open(work / "holdout")
    embedded = embed(make_model(), preparer, shard_set, ALONE)
    found = json.loads(json.dumps(pick_examples(embedded, shard_set)))
    assert len(found["images"]) == 12 and len(found["texts"]) == 6
    similarity = embedded.img_NE @ embedded.txt_ME.T
    uids = [sample.uid for sample in shard_set.read(np.arange(len(shard_set)))]
    for row in found["images"]:
        n = uids.index(row["uid"])
        assert row["captions"] == shard_set.captions(n)
        assert row["top"][0]["caption"] == embedded.captions[int(similarity[n].argmax())]
        assert [t["right"] for t in row["top"]] == [t["caption"] in row["captions"] for t in row["top"]]
        jpeg = base64.b64decode(row["jpeg"])
        assert decode(jpeg, read_header(jpeg)).shape == (48, 64, 3)
    assert all(len(row["top"]) == 5 for row in found["texts"])


def test_the_stage_measures_the_newest_checkpoint_and_writes_it_down(work: Path) -> None:
    config = EvalConfig(work=str(work), zero_shot=str(work / "classes"), precision="fp32")
    summary = run(config)
    assert summary["step"] == 7 and summary["checkpoint"].endswith("step_00000007")
    assert set(summary["retrieval"]) == {
        *(f"{d}_r{k}" for d in ("t2i", "i2t") for k in (1, 5, 10)),
        "images",
        "captions",
    }
    assert summary["zero_shot"]["classes"] == 4
    rows = [json.loads(line) for line in (work / "runs/main/eval.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 7 and rows[-1]["retrieval"] == summary["retrieval"]
    assert json.loads((work / "runs/main/examples.json").read_text())["step"] == 7
    half = run(dataclasses.replace(config, val="none", precision="bf16"))
    assert "retrieval" not in half and half["zero_shot"]["pictures"] == summary["zero_shot"]["pictures"]


def test_bad_input_is_one_sentence(work: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to measure on"):
        run(EvalConfig(work=str(work), val="none"))
    with pytest.raises(InputError, match="expected weights at"):
        run(EvalConfig(work=str(tmp_path)))
    (tmp_path / "one_class").mkdir()
    with pytest.raises(InputError, match=r"at least two class folders .* found 0"):
        run(EvalConfig(work=str(work), zero_shot=str(tmp_path)))
    templates = tmp_path / TEMPLATES_FILE
    templates.write_text("a photo of a {}\nno place for it\n")
    with pytest.raises(InputError, match="for each template"):
        read_templates(str(tmp_path))
    templates.write_bytes("ein Bild von {}, schön\n".encode("latin-1"))
    with pytest.raises(InputError, match="in UTF-8"):
        read_templates(str(tmp_path))
    templates.write_text("a {}\n\n{} here\n")
    assert read_templates(str(tmp_path)) == ["a {}", "{} here"]
    templates.unlink()
    templates.mkdir()
    with pytest.raises(InputError, match="expected a file of templates"):
        read_templates(str(tmp_path))
    templates.rmdir()
    assert read_templates(str(tmp_path)) == TEMPLATES
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write"):
        run(EvalConfig(work=str(tmp_path / "file"), checkpoint=str(work / "runs/main"), val=str(work / "holdout")))
    assert val_folder(str(work), "") == f"{work}/holdout" and val_folder(str(tmp_path), "") == ""

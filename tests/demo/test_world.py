"""The demo world: same bytes every time, every fault as planted, nothing of the evaluation in the list."""

from __future__ import annotations

import hashlib
import io
import itertools
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps
from scipy.fft import dctn

from core.errors import InputError, StorageError
from demo import world as w
from demo.faults import KINDS, Row
from demo.world import World, make_world, write_urls

Rows = Callable[[str], list[Row]]
FileOf = Callable[[str], Path]


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def upright(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def look(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize((32, 32), Image.Resampling.BOX), dtype=float)


def alike(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b)


def test_same_seed_same_bytes(world: World, tmp_path: Path) -> None:
    again = make_world(tmp_path / "again", pictures=world.pictures)
    assert tree(again.folder) == tree(world.folder)


def test_list_holds_every_kind_as_often_as_counted(world: World, tmp_path: Path) -> None:
    table = pq.read_table(write_urls(world, "http://127.0.0.1:1", tmp_path / "urls.parquet")).to_pylist()
    assert Counter(row["planted"] for row in table) == world.counts
    assert set(world.counts) == {"good", *KINDS} and min(world.counts.values()) >= 2
    assert Counter(row["caption"] for row in table) == Counter(row.caption for row in world.rows())
    assert all(row["url"].startswith("http://127.0.0.1:1/") for row in table if row["planted"] != "bad_url")
    assert not any(row["url"].startswith("http://127.0.0.1:1/") for row in table if row["planted"] == "bad_url")


def test_list_is_shuffled_and_always_in_the_same_way(world: World, tmp_path: Path) -> None:
    lists = [write_urls(world, "http://h:1", tmp_path / name) for name in ("a.parquet", "b.parquet")]
    assert lists[0].read_bytes() == lists[1].read_bytes()
    kinds = pq.read_table(lists[0])["planted"].to_pylist()
    assert kinds[:120].count("good") < 110  # unshuffled, the first 120 rows are the good ones


def test_list_shows_and_names_no_class_of_the_evaluation(world: World) -> None:
    plurals = [f"{name}es" if name.endswith("s") else f"{name}s" for name in world.class_names]
    for row in world.rows():
        assert not set(row.shows) & set(world.class_names)
        assert not [name for name in (*world.class_names, *plurals) if name in row.caption]


def test_evaluation_has_enough_classes_of_known_words(world: World) -> None:
    assert len(world.class_names) >= 24
    assert sorted(path.name for path in world.eval_dir.iterdir()) == sorted(world.class_names)
    assert len({len(list(path.glob("*.png"))) for path in world.eval_dir.iterdir()}) == 1
    shown = Counter(word for row in world.rows() for name in row.shows for word in name.split())
    assert min(shown[word] for word in (*w.COLOURS, *w.SHAPES)) >= 8
    assert all("{}" in template for template in world.templates)


def test_captions_say_what_the_picture_shows(world: World) -> None:
    for row in world.rows():
        if row.caption.strip():
            assert all(name in row.caption for name in row.shows), row


def test_files_are_what_their_names_say(world: World) -> None:
    formats = Counter()
    for path in (world.folder / "pictures").iterdir():
        with Image.open(path) as image:
            image.load()
            formats[image.format] += 1
            assert {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}[image.format or ""] == path.suffix
            assert min(image.size) >= 96 and max(image.size) <= 256
    assert set(formats) == {"JPEG", "PNG", "WEBP"}


def test_turned_jpegs_stand_upright_by_their_exif() -> None:
    image = w.draw(Random(1), w.scene(Random(1), ("red", "star")))
    bodies = [w.encode(Random(seed), image, "jpg")[0] for seed in range(40)]
    turned = [body for body in bodies if Image.open(io.BytesIO(body)).getexif().get(0x0112) == 6]
    assert turned
    stored = Image.open(io.BytesIO(turned[0]))
    assert stored.size == image.size[::-1]
    assert np.abs(look(ImageOps.exif_transpose(stored)) - look(image)).mean() < 4


@pytest.mark.parametrize("colour", w.COLOURS)
def test_things_have_the_colour_they_are_named_by(colour: str) -> None:
    seen = w.Scene((w.Thing(colour, "circle"),), "grey", 0.6, (0, 0))
    image = np.asarray(w.draw(Random(3), seen), dtype=float)
    y, x = image.shape[0] // 2, image.shape[1] // 2
    found = image[y - 6 : y + 6, x - 6 : x + 6].mean((0, 1))
    nearest = min(w.COLOURS, key=lambda name: np.abs(found - w.COLOURS[name]).sum())
    assert nearest == colour


def test_shapes_differ_from_each_other() -> None:
    masks = {shape: np.asarray(w._mask(shape, 60, 0.0)) > 127 for shape in w.SHAPES}
    for a, b in itertools.combinations(w.SHAPES, 2):
        assert (masks[a] & masks[b]).sum() / (masks[a] | masks[b]).sum() < 0.88, (a, b)


def test_good_captions_are_no_near_duplicates(rows: Rows) -> None:
    bags = [w.words(row.caption) for row in rows("good")]
    assert max(alike(a, b) for a, b in itertools.combinations(bags, 2)) < 0.8


def test_captions_never_run_out() -> None:
    phrases, seen = w.Phrases(), w.Scene((w.Thing("red", "star"),), "grey", 0.5, (0, 0))
    bags = [w.words(phrases.new(Random(number), seen)) for number in range(150)]
    assert max(alike(a, b) for a, b in itertools.combinations(bags, 2)) < 0.8


def test_planted_captions_are_near_duplicates(world: World, rows: Rows) -> None:
    said = {row.path: row.caption for row in rows("good")}
    for row in rows("near_caption"):
        assert row.caption != said[row.twin]
        assert alike(w.words(row.caption), w.words(said[row.twin])) >= 0.8
    assert all(row.path == row.twin and row.caption != said[row.twin] for row in rows("captions"))
    assert min(Counter(row.caption for row in rows("same_caption")).values()) >= 11


def test_copies_look_like_their_originals(rows: Rows, file_of: FileOf) -> None:
    for row in rows("exact"):
        assert file_of(row.path).read_bytes() == file_of(row.twin).read_bytes() and row.path != row.twin
    for row in rows("reencoded"):
        assert file_of(row.path).read_bytes() != file_of(row.twin).read_bytes()
        assert np.abs(look(upright(file_of(row.path))) - look(upright(file_of(row.twin)))).mean() < 4
    for row in rows("mirrored"):
        mirrored, twin = upright(file_of(row.path)), upright(file_of(row.twin))
        assert np.abs(look(ImageOps.mirror(mirrored)) - look(twin)).mean() < 4
        assert np.abs(look(mirrored) - look(twin)).mean() > 8


def test_other_pictures_do_not_look_alike_to_an_image_hash(rows: Rows, file_of: FileOf) -> None:
    def bits(path: Path) -> np.ndarray:
        grey = upright(path).convert("L").resize((64, 64), Image.Resampling.BOX)
        low = dctn(np.asarray(grey, dtype=float), norm="ortho")[1:17, 1:17].ravel()
        return low > np.median(low)

    distinct = [*rows("good"), *rows("near_caption"), *rows("same_caption")]
    hashes = [bits(file_of(row.path)) for row in distinct]
    assert min((a ^ b).sum() for a, b in itertools.combinations(hashes, 2)) > 40  # duplicates are within 31 of 256


def test_bombs_are_small_files_of_many_pixels(rows: Rows, file_of: FileOf) -> None:
    bodies = [file_of(row.path).read_bytes() for row in rows("bomb")]
    for body in bodies:
        side, height = struct.unpack(">II", body[16:24])
        assert len(body) < 150_000 and side * height >= 400_000_000
        with pytest.raises(Image.DecompressionBombError):
            Image.open(io.BytesIO(body))
    packed = zlib.decompressobj()
    size = int.from_bytes(bodies[0][33:37], "big")
    assert len(packed.decompress(bodies[0][41 : 41 + size])) == 20_000 * 2501  # the pixels are all there


@pytest.mark.parametrize("kind", ["truncated", "corrupt"])
def test_broken_files_have_a_header_and_no_pixels(kind: str, rows: Rows, file_of: FileOf) -> None:
    for row in rows(kind):
        with Image.open(file_of(row.path)) as image:
            assert min(image.size) >= 96
            with pytest.raises((OSError, SyntaxError)):
                image.load()


def test_useless_sizes(rows: Rows, file_of: FileOf) -> None:
    assert all(max(upright(file_of(row.path)).size) < 32 for row in rows("tiny"))
    for row in rows("aspect"):
        size = upright(file_of(row.path)).size
        assert max(size) / min(size) > 10 and min(size) >= 32


def test_hostile_captions_hold_what_hurts(rows: Rows) -> None:
    text = " ".join(row.caption for row in rows("hostile"))
    assert all(part in text for part in ("<script>", '"', "'", "\t", "\\", "🌟", "\u202e", "%s", "{}", "DROP TABLE"))
    assert {row.caption.strip() for row in rows("no_caption")} == {""}


def test_finished_world_is_used_again_and_an_unfinished_one_replaced(world: World, tmp_path: Path) -> None:
    unfinished = tmp_path / "world.part"
    unfinished.mkdir()
    (unfinished / "rest").write_text("of a killed run")
    calls: list[tuple[int, int]] = []

    def make(seed: int) -> World:
        return make_world(tmp_path / "world", pictures=60, seed=seed, progress=lambda *done: calls.append(done))

    made = make(1)
    assert calls and calls[-1][0] == calls[-1][1] and not unfinished.exists() and not (made.folder / "rest").exists()
    assert not set(tree(made.folder / "pictures").values()) & set(tree(world.folder / "pictures").values())
    calls.clear()
    assert make(1) == made and not calls
    with pytest.raises(StorageError, match="seed 5 with 60 pictures"):
        make(5)


def test_wrong_arguments_and_folders_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 60 pictures"):
        make_world(tmp_path / "few", pictures=3)
    with pytest.raises(InputError, match="sides of 96 to 512 px"):
        make_world(tmp_path / "small", px=(16, 32))
    with pytest.raises(InputError, match="found none"):
        w.load_world(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="something else"):
        make_world(tmp_path / "file", pictures=60)

"""A deterministic world of rendered pictures with captions, faults and held-out combinations.

Every picture shows one to four coloured shapes; every caption names colour and shape of what is there. The evaluation
classes are combinations (a colour with a shape) that no picture and no caption of the URL list shows, while each of
their colours and shapes is common in other combinations: a model that scores on them has learned the words.

On disk, all written into `FOLDER.part` first and renamed when complete:

    world.json             settings, counts, class names, prompt templates
    rows.jsonl             the URL list in relative form, one row a line
    pictures/NAME          the good pictures
    faults/KIND/NAME       pictures served in a special way, and broken files
    eval/CLASS/NAME.png    pictures of the held-out combinations

No two captions of good rows share four fifths of their words, so that text deduplication finds what was planted only.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from core.errors import InputError, StorageError
from demo.faults import GOOD, Row, encode, plant, planted_counts

if TYPE_CHECKING:
    from PIL import Image

VERSION = 1
COLOURS = {
    "red": (214, 32, 36),
    "orange": (250, 140, 20),
    "yellow": (246, 222, 40),
    "green": (36, 160, 60),
    "cyan": (40, 205, 215),
    "blue": (36, 70, 215),
    "purple": (130, 40, 170),
    "pink": (250, 130, 185),
    "brown": (125, 72, 32),
    "white": (244, 244, 244),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "ring", "crescent", "diamond", "arrow")
BACKGROUNDS = {
    "dark": (26, 27, 32),
    "light": (222, 223, 226),
    "grey": (122, 122, 124),
    "sandy": (196, 178, 140),
    "misty": (156, 172, 188),
    "mossy": (84, 98, 76),
    "cloudy": (176, 182, 190),
}
TEXTURES = ("plain", "plain", "plain", "striped", "dotted", "checked")
PLACES = tuple((dx, dy) for dy in (-1, 0, 1) for dx in (-1, 0, 1))
HELD_OUT = frozenset((c, SHAPES[(i + step) % len(SHAPES)]) for i, c in enumerate(COLOURS) for step in (0, 3, 7))
TRAINED = tuple((c, s) for c in COLOURS for s in SHAPES if (c, s) not in HELD_OUT)
CLASSES = tuple(f"{c} {s}" for c in COLOURS for s in SHAPES if (c, s) in HELD_OUT)
TEMPLATES = ("a {}", "a picture of a {}", "a photo of a {}", "a drawing of a {}", "a {} on a dark background")

Progress = Callable[[int, int], None]
Polygon = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class World:
    """A finished world. `counts`: rows by planted kind ("good" included); `rows()` reads the list, in written order."""

    folder: Path
    seed: int
    pictures: int
    px: tuple[int, int]
    counts: dict[str, int]
    eval_dir: Path
    class_names: tuple[str, ...]
    templates: tuple[str, ...]

    def rows(self) -> list[Row]:
        with (self.folder / "rows.jsonl").open(encoding="utf-8") as lines:
            return [Row(**{**found, "shows": tuple(found["shows"])}) for found in map(json.loads, lines)]


# ---------------------------------------------------------------------------------------------------------------------
# the way in and out


def make_world(
    folder: Path,
    *,
    seed: int = 0,
    pictures: int = 3000,
    px: tuple[int, int] = (160, 256),
    progress: Progress | None = None,
) -> World:
    """Renders a world of `pictures` good pictures (sides within `px`) into `folder`; same arguments, same bytes.

    A folder that already holds this very world is used as it is. Raises InputError for arguments that make no world, and
    StorageError for a folder that holds something else. progress(done, total) counts rendered pictures.
    """
    if pictures < 60 or not 96 <= px[0] <= px[1] <= 512:
        raise InputError(
            f"A demo world needs at least 60 pictures and sides of 96 to 512 px; found {pictures} pictures "
            f"and sides {px[0]}-{px[1]}: choose others."
        )
    folder = Path(folder)
    if (folder / "world.json").exists():
        world = load_world(folder)
        if (world.seed, world.pictures, world.px) == (seed, pictures, px):
            return world
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(
            f"Expected an empty folder, or the demo world of seed {seed} with {pictures} pictures, in {folder}; it holds "
            "something else: name another folder, or delete this one."
        )
    part = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        Studio(part, seed, pictures, px, progress or (lambda done, total: None)).build()
        part.replace(folder)
    except OSError as error:
        raise StorageError(
            f"The demo world could not be written to {folder} ({error}): free space or name another."
        ) from error
    return load_world(folder)


def load_world(folder: Path) -> World:
    """The finished world in `folder`; InputError when there is none, or one of another version."""
    try:
        found = json.loads((folder / "world.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"Expected a demo world (world.json) in {folder}, found none: make one there first."
        ) from error
    if found.pop("version") != VERSION:
        raise InputError(
            f"The demo world in {folder} was made by another version: delete the folder and make it again."
        )
    found |= {name: tuple(found[name]) for name in ("px", "class_names", "templates")}
    return World(folder=folder, eval_dir=folder / "eval", **found)


def write_urls(world: World, base_url: str, path: Path | None = None) -> Path:
    """Writes the URL list for a server at `base_url` and returns its path (`urls.parquet` in the world's folder, or `path`).

    Columns url, caption, planted, twin; Parquet, because captions hold tabs and quotes. The order is shuffled, always in
    the same way.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = world.rows()
    Random(f"{world.seed}:order").shuffle(rows)

    def whole(part: str) -> str:
        return base_url + part if part.startswith("/") else part

    columns = {"url": [whole(row.path) for row in rows], "caption": [row.caption for row in rows]}
    columns |= {"planted": [row.planted for row in rows], "twin": [whole(row.twin) for row in rows]}
    target = path or world.folder / "urls.parquet"
    pq.write_table(pa.table(columns), target)
    return target


# ---------------------------------------------------------------------------------------------------------------------
# what a picture shows, and what is said about it


@dataclass(frozen=True)
class Thing:
    """`count` objects of one colour, shape and texture."""

    colour: str
    shape: str
    texture: str = "plain"
    count: int = 1


@dataclass(frozen=True)
class Scene:
    """One or two kinds of things. diameter: as a share of the shorter side; place: steps from the centre, one object only."""

    things: tuple[Thing, ...]
    background: str
    diameter: float
    place: tuple[int, int] | None = None

    @property
    def shows(self) -> tuple[str, ...]:
        return tuple(f"{thing.colour} {thing.shape}" for thing in self.things)

    @property
    def size(self) -> str:
        return "small" if self.diameter < 0.6 else "large" if self.diameter > 0.75 else ""

    def mirrored(self) -> Scene:
        return replace(self, place=self.place and (-self.place[0], self.place[1]))


def scene(rng: Random, combination: tuple[str, str], kinds: int = 1, count: int = 1) -> Scene:
    """A random scene of `combination` (colour, shape), with another trained one beside it when `kinds` is 2."""
    things = [Thing(*combination, rng.choice(TEXTURES), count)]
    if kinds == 2:
        other = rng.choice([pair for pair in TRAINED if pair != combination])
        things.append(Thing(*other, rng.choice(TEXTURES)))
    backgrounds = [name for name in BACKGROUNDS if all(_contrast(thing.colour, name) > 130 for thing in things)]
    single = len(things) == 1 and count == 1
    diameter = rng.uniform(0.5, 0.86) if single else rng.uniform(0.42, 0.48)
    return Scene(tuple(things), rng.choice(backgrounds), diameter, rng.choice(PLACES) if single else None)


def _contrast(colour: str, background: str) -> int:
    return sum(abs(a - b) for a, b in zip(COLOURS[colour], BACKGROUNDS[background], strict=True))


# fmt: off
_SHORT = (
    "{np}", "{np} {place}", "{np} on a {bg} background", "a picture of {np}", "a photo of {np}",
    "a photo of {np}, {place}", "a drawing of {np} {place}", "an image with {np}", "{np} on {bg}", "this shows {np}",
    "there is {np} {place}", "{np}, {bg} behind it", "{place}: {np}", "{bg} background with {np}",
    "we see {np} {place}",
)
# fmt: on
_PAIR = ("{np} and {np2}", "{np2} next to {np}", "{np} with {np2}", "{np2} beside {np}", "picture of {np}, {np2}")
_LONG = "a picture showing {np} {place} and a {bg} background behind it"
_ROWS, _SIDES = {-1: "top", 0: "", 1: "bottom"}, {-1: "left", 0: "", 1: "right"}
_NUMBERS = {2: "two", 3: "three", 4: "four"}


def _noun(thing: Thing, adjectives: str) -> str:
    name = f"{adjectives} {thing.colour} {thing.shape}".strip()
    if thing.count == 1:
        return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    return f"{_NUMBERS[thing.count]} {name}{'es' if thing.shape.endswith('s') else 's'}"


def _placed(place: tuple[int, int] | None) -> str:
    words = f"{_ROWS[place[1]]} {_SIDES[place[0]]}".strip() if place else ""
    return f"at the {words}" if words else "in the centre"


def phrase(rng: Random, seen: Scene, forms: tuple[str, ...] | None = None) -> str:
    """A caption of a scene. Texture, size, place and background are mentioned or not; colour and shape always are."""
    forms = forms or (_PAIR if len(seen.things) == 2 else _SHORT)
    form = rng.choice([form for form in forms if seen.place or "{place}" not in form])
    nouns = []
    for thing in seen.things:
        said = [seen.size] if seen.place and rng.random() < 0.6 else []
        said += [thing.texture] if thing.texture != "plain" and rng.random() < 0.6 else []
        nouns.append(_noun(thing, " ".join(filter(None, said))))
    return form.format(np=nouns[0], np2=nouns[-1], place=_placed(seen.place), bg=seen.background)


class Phrases:
    """Hands out captions of which no two are near-duplicates (Jaccard of their word sets below 0.8).

    Sets of at most 8 words reach 0.8 only by being equal or by one containing the other and one word more (and 4 words or
    more), which sets of words kept in a hash table can tell at once.
    """

    def __init__(self) -> None:
        self._said: set[frozenset[str]] = set()
        self._one_less: set[frozenset[str]] = set()
        self._long: list[frozenset[str]] = []

    def new(self, rng: Random, seen: Scene) -> str:
        """A fresh caption; when all phrasings are used up, one that carries a number."""
        for _ in range(60):
            caption = phrase(rng, seen)
            if self._take(words(caption)):
                return caption
        for number in range(1, 1_000_000):
            caption = f"number {number}: {_noun(seen.things[0], '')}"
            if self._take(words(caption)):
                return caption
        raise AssertionError("a million captions of one combination")

    def new_long(self, rng: Random, seen: Scene) -> str:
        """A caption of 14 words or more, of which one can be changed and 0.8 of them still be shared."""
        for _ in range(60):
            caption = phrase(rng, seen, (_LONG,))
            bag = words(caption)
            if all(len(bag & other) < 0.8 * len(bag | other) for other in self._long):
                self._long.append(bag)
                return caption
        return self.new(rng, seen)

    def _take(self, bag: frozenset[str]) -> bool:
        less = [bag - {word} for word in bag]
        if len(bag) > 8 or bag in self._said or bag in self._one_less or not self._said.isdisjoint(less):
            return False
        self._said.add(bag)
        self._one_less.update(less)
        return True


def words(caption: str) -> frozenset[str]:
    return frozenset(caption.lower().replace(",", " ").replace(":", " ").split())


# ---------------------------------------------------------------------------------------------------------------------
# drawing


def draw(rng: Random, seen: Scene, px: tuple[int, int] = (160, 256)) -> Image.Image:
    """Renders a scene as an RGB picture whose sides lie within `px`; all objects stay inside the central square."""
    from PIL import ImageChops

    short, ratio = rng.randint(*px), rng.choice((1.0, 1.0, 1.0, 1.2, 4 / 3))
    long, short = min(px[1], round(short * ratio)), max(px[0], min(short, round(px[1] / ratio)))
    width, height = (long, short) if rng.random() < 0.5 else (short, long)
    canvas = _background(rng, seen.background, width, height)
    for thing, x, y in _layout(rng, seen):
        size = round(seen.diameter * rng.uniform(0.95, 1.05) * short)
        left, top = round(width / 2 + x * short - size / 2), round(height / 2 + y * short - size / 2)
        canvas.paste(_fill(rng, thing, size), (left, top), _mask(thing.shape, size, rng.uniform(-0.22, 0.22)))
    grain = _grain(rng.choice((4, 10, 18)))
    left, top = rng.randrange(512 - width + 1), rng.randrange(512 - height + 1)
    return ImageChops.add(canvas, grain.crop((left, top, left + width, top + height)), 1, -128)


def _layout(rng: Random, seen: Scene) -> Iterator[tuple[Thing, float, float]]:
    """Each object's thing and centre, in units of the shorter side from the picture's centre."""
    if seen.place:
        room = (1 - seen.diameter) / 2 * 0.92
        x, y = (room * (0.82 * step + rng.uniform(-0.18, 0.18)) for step in seen.place)
        yield seen.things[0], x, y
        return
    cells = rng.sample([(-1, -1), (1, -1), (-1, 1), (1, 1)], sum(thing.count for thing in seen.things))
    for thing in seen.things:
        for _ in range(thing.count):
            x, y = (0.25 * step + rng.uniform(-0.025, 0.025) for step in cells.pop())
            yield thing, x, y


def _background(rng: Random, name: str, width: int, height: int) -> Image.Image:
    """A colour under soft clouds of two sizes: no two pictures look the same to an image hash."""
    from PIL import Image

    base = Image.new("RGB", (width, height), tuple(_jitter(rng, BACKGROUNDS[name], 8)))
    strength = 0.45 if name == "cloudy" else rng.uniform(0.18, 0.28)
    for cells in (6, 12):
        blobs = Image.frombytes("L", (cells, cells), rng.randbytes(cells * cells))
        clouds = blobs.resize((width, height), Image.Resampling.BICUBIC)
        base = Image.blend(base, clouds.convert("RGB"), strength)
        strength *= 0.6
    return base


def _jitter(rng: Random, colour: tuple[int, int, int], by: int) -> list[int]:
    shade = rng.randint(-by, by)
    return [max(0, min(255, channel + shade + rng.randint(-by, by))) for channel in colour]


def _fill(rng: Random, thing: Thing, size: int) -> Image.Image:
    """A square of the thing's colour, patterned with a darker shade of it."""
    from PIL import Image, ImageDraw

    colour = _jitter(rng, COLOURS[thing.colour], 9)
    tile = Image.new("RGB", (size, size), tuple(colour))
    shade = tuple(round(channel * 0.62) for channel in colour)
    pen = ImageDraw.Draw(tile)
    step = max(4, size // rng.choice((5, 6, 7)))
    starts = range(0, size, step)
    if thing.texture == "striped":
        for at in starts:
            band = (at, 0, at + step // 2 - 1, size)
            pen.rectangle(band if size % 2 else (band[1], band[0], band[3], band[2]), fill=shade)
    elif thing.texture == "dotted":
        for x, y in product(starts, starts):
            pen.ellipse((x, y, x + step * 0.6, y + step * 0.6), fill=shade)
    elif thing.texture == "checked":
        for x, y in product(starts, starts):
            if (x + y) // step % 2:
                pen.rectangle((x, y, x + step - 1, y + step - 1), fill=shade)
    return tile


def _mask(shape: str, size: int, turn: float) -> Image.Image:
    """The antialiased outline of a shape, turned by `turn` radians, in a square of `size` pixels (3x3 supersampled)."""
    from PIL import Image, ImageDraw

    half = size * 3 / 2
    cos, sin = math.cos(turn) * half * 0.96, math.sin(turn) * half * 0.96
    mask = Image.new("L", (size * 3, size * 3))
    for number, polygon in enumerate(_outlines()[shape]):
        corners = [(half + x * cos - y * sin, half + x * sin + y * cos) for x, y in polygon]
        ImageDraw.Draw(mask).polygon(corners, fill=255 if number == 0 else 0)
    return mask.reduce(3)


def _disc(radius: float, x: float = 0.0, y: float = 0.0) -> Polygon:
    turns = [2 * math.pi * step / 48 for step in range(48)]
    return tuple((x + radius * math.cos(t), y + radius * math.sin(t)) for t in turns)


def _heart_height(t: float) -> float:
    return -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 17


@lru_cache(maxsize=1)
def _outlines() -> dict[str, tuple[Polygon, ...]]:
    """Polygons within the unit circle (y points down); every one after a shape's first is cut out of it."""
    turns = [2 * math.pi * step / 48 for step in range(48)]
    heart = tuple((math.sin(t) ** 3 * 0.95, _heart_height(t)) for t in turns)
    spikes = [(2 * math.pi * step / 10, 0.42 if step % 2 else 1.0) for step in range(10)]
    corner = ((0.3, -0.92), (0.3, -0.3), (0.92, -0.3))
    cross = (
        corner
        + tuple((-y, x) for x, y in corner)
        + tuple((-x, -y) for x, y in corner)
        + tuple((y, -x) for x, y in corner)
    )
    return {
        "circle": (_disc(0.92),),
        "square": (((-0.7, -0.7), (0.7, -0.7), (0.7, 0.7), (-0.7, 0.7)),),
        "triangle": (((0, -0.98), (0.85, 0.5), (-0.85, 0.5)),),
        "star": (tuple((math.sin(t) * r, -math.cos(t) * r) for t, r in spikes),),
        "heart": (heart,),
        "cross": (cross,),
        "ring": (_disc(0.95), _disc(0.52)),
        "crescent": (_disc(0.95), _disc(0.82, 0.46)),
        "diamond": (((0, -1), (0.62, 0), (0, 1), (-0.62, 0)),),
        "arrow": (((-0.95, -0.22), (0.1, -0.22), (0.1, -0.68), (0.98, 0), (0.1, 0.68), (0.1, 0.22), (-0.95, 0.22)),),
    }


@lru_cache(maxsize=3)
def _grain(strength: int) -> Image.Image:
    """512 x 512 pixels of sensor noise around 128, the same in every world."""
    from PIL import Image

    noise = Image.frombytes("RGB", (512, 512), Random(strength).randbytes(512 * 512 * 3))
    return noise.point([128 + (value - 128) * strength // 128 for value in range(256)] * 3)


# ---------------------------------------------------------------------------------------------------------------------
# the studio: pictures and rows of one world


class Studio:
    """Draws, saves and captions. `good` holds the good rows with their scenes, for the faults that repeat them."""

    def __init__(self, folder: Path, seed: int, pictures: int, px: tuple[int, int], progress: Progress) -> None:
        self.folder, self.seed, self.pictures, self.px = folder, seed, pictures, px
        self.counts = {GOOD: pictures, **planted_counts(pictures)}
        self.phrases = Phrases()
        self.rows: list[Row] = []
        self.good: list[tuple[Row, Scene]] = []
        self._progress = progress
        self._done = 0
        self._eval_each = max(2, min(24, pictures // 100))
        self._total = pictures + len(CLASSES) * self._eval_each

    def build(self) -> None:
        long = self.counts["near_caption"] // 2
        for index in range(self.pictures):
            rng = self.rng(GOOD, index)
            seen = self.single(rng) if index < long else self.scene(rng, index)
            caption = (self.phrases.new_long if index < long else self.phrases.new)(rng, seen)
            name = self.save("pictures", f"{index:06d}", *encode(rng, draw(rng, seen, self.px)))
            self.good.append((Row(f"/i/{name}", caption, GOOD, "", seen.shows), seen))
        self.rows += [row for row, _ in self.good]
        self.rows += plant(self)
        self._evaluation()
        with (self.folder / "rows.jsonl").open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in self.rows)
        facts = {"version": VERSION, "seed": self.seed, "pictures": self.pictures, "px": self.px, "counts": self.counts}
        facts |= {"class_names": CLASSES, "templates": TEMPLATES}
        (self.folder / "world.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    def rng(self, kind: str, index: int) -> Random:
        return Random(f"{self.seed}:{kind}:{index}")

    def draw(self, rng: Random, seen: Scene) -> Image.Image:
        return draw(rng, seen, self.px)

    def single(self, rng: Random, combination: tuple[str, str] | None = None) -> Scene:
        return scene(rng, combination or rng.choice(TRAINED))

    def scene(self, rng: Random, index: int) -> Scene:
        """Seven scenes in ten show one object, the others several of a kind or two kinds."""
        combination = TRAINED[index % len(TRAINED)]
        sort = rng.random()
        return scene(
            rng, combination, kinds=2 if sort > 0.85 else 1, count=rng.randint(2, 4) if 0.7 < sort <= 0.85 else 1
        )

    def save(self, where: str, stem: str, body: bytes, form: str) -> str:
        """Writes one file and returns its name."""
        target = self.folder / where / f"{stem}.{form}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(body)
        self._done = min(self._total, self._done + 1)
        self._progress(self._done, self._total)
        return target.name

    def _evaluation(self) -> None:
        """One kind of object a picture, seen in four of five as a single one, as in the list."""
        for name in CLASSES:
            for index in range(self._eval_each):
                rng = self.rng(name, index)
                count = 1 if index % 5 else rng.randint(1, 4)
                colour, _, shape = name.partition(" ")
                picture = draw(rng, scene(rng, (colour, shape), count=count), self.px)
                self.save(f"eval/{name}", f"{index:03d}", *encode(rng, picture, "png"))

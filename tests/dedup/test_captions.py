"""Caption matching against an exact oracle, and the rule of tokens."""

from __future__ import annotations

import functools
import random
import tracemalloc
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import InputError
from dedup import minhash
from dedup.match import jaccard
from dedup.tokens import as_sets, fold, tokenise
from tests.dedup.parts import datasketchs_values, decide, decisions, kept, pair, write_parts

THRESHOLD = 0.8


def planted(n: int, seed: int = 7) -> list[str]:
    """`n` captions of 5 to 20 words of a Zipf-like vocabulary; a third are edits of one or two words of an earlier one."""
    rng = random.Random(seed)
    vocabulary = [f"w{i}" for i in range(3000)]
    weights = [1 / (i + 3) for i in range(3000)]
    captions: list[str] = []
    while len(captions) < n:
        if captions and rng.random() < 0.33:
            words = rng.choice(captions).split()
            for _ in range(rng.randint(1, 2)):
                place = rng.randrange(len(words))
                edit = rng.random()
                if edit < 0.4:
                    words[place] = rng.choice(vocabulary)
                elif edit < 0.7 and len(words) > 5:
                    del words[place]
                else:
                    words.insert(place, rng.choice(vocabulary))
        else:
            words = rng.choices(vocabulary, weights, k=rng.randint(5, 20))
        captions.append(" ".join(words))
    return captions


def oracle(captions: list[str], threshold: float) -> set[tuple[int, int]]:
    """Pairs of captions of five words or more at or above the threshold, found through shared rare words, and a chain
    through each group of equal sets."""
    sets = [frozenset(c.split()) for c in captions]
    count = Counter(word for s in sets for word in s)
    index: dict[str, list[int]] = {}
    for i, words in enumerate(sets):
        rare = sorted(words, key=lambda w: (count[w], w))
        for word in rare[: len(words) - int(np.ceil(threshold * len(words) - 1e-9)) + 1]:
            index.setdefault(word, []).append(i)
    near = {pair for rows in index.values() for pair in combinations(rows, 2)}
    first: dict[frozenset[str], int] = {}
    equal = {(first[s], i) for i, s in enumerate(sets) if first.setdefault(s, i) != i}
    big = {i for i, s in enumerate(sets) if len(s) >= 5}
    return equal | {
        (i, j)
        for i, j in near
        if i in big and j in big and len(sets[i] & sets[j]) >= threshold * len(sets[i] | sets[j]) - 1e-9
    }


def components(n: int, pairs: set[tuple[int, int]]) -> list[int]:
    parent = list(range(n))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, j in pairs:
        parent[max(root(i), root(j))] = min(root(i), root(j))
    return [root(i) for i in range(n)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    work, captions = tmp_path_factory.mktemp("world"), planted(6000)
    write_parts(work, [pair(f"p{i:05d}", c, f"http://x/{i}") for i, c in enumerate(captions)], sizes=[2500, 1500])
    decide(work, policy="text", max_images_per_caption=1, method="components")
    return work, captions


def test_recall_and_precision_against_the_oracle(world: tuple[Path, list[str]]) -> None:
    work, captions = world
    truth = oracle(captions, THRESHOLD)
    with pa.ipc.open_file(work / "dedup" / "edges" / "captions-5.arrow") as file:
        table = file.read_all().filter(pa.compute.field("similarity") >= THRESHOLD)
    _, keys, _ = as_sets(pa.array(captions))
    rows = {int(k): i for i, k in reversed(list(enumerate(keys)))}
    number = np.unique(keys)  # sets are numbered in order of their keys
    found = [
        (rows[int(number[a])], rows[int(number[b])], s)
        for a, b, s in zip(*(table[c].to_pylist() for c in ("a", "b", "similarity")), strict=True)
    ]
    for a, b, similarity in found:  # precision: every edge is exactly as similar as it says
        left, right = set(captions[a].split()), set(captions[b].split())
        assert similarity == pytest.approx(len(left & right) / len(left | right))
    # recall: rows that the oracle removes (all but one of each component) and we do too
    ours, theirs = components(6000, {(min(a, b), max(a, b)) for a, b, _ in found}), components(6000, truth)
    same = {i for i, key in enumerate(keys) if rows[int(key)] != i}  # equal sets, joined by their key
    removed = {i for i, r in enumerate(theirs) if r != i}
    missed = {i for i in removed if ours[i] == i and i not in same}
    assert len(removed) > 1200
    assert len(missed) / len(removed) <= 0.005


def test_decisions_follow_the_oracle(world: tuple[Path, list[str]]) -> None:
    work, captions = world
    label = components(6000, oracle(captions, THRESHOLD))
    expected = len(set(label))
    assert abs(len(kept(work)) - expected) <= 0.005 * (6000 - expected)
    for uid, row in decisions(work).items():
        if not row["kept"]:  # precision 1: nothing is removed for a pair outside its own component
            assert label[int(uid[1:])] == label[int(row["survivor"][1:])]


def test_minhash_estimates_jaccard_without_bias() -> None:
    left = [" ".join(f"a{i}-{j}".replace("-", "x") for j in range(20)) for i in range(400)]
    right = [" ".join(c.split()[:16] + [f"b{i}x{j}" for j in range(4)]) for i, c in enumerate(left)]
    sets, _, _ = as_sets(pa.array(left + right))
    true = 16 / 24
    for make in (functools.partial(minhash.values, permutations=range(60)), datasketchs_values):
        values = make(sets, np.arange(800))
        estimate = (values[:, :400] == values[:, 400:]).mean(axis=0)
        # 400 estimates of 60 permutations each: the mean's standard error is 0.003
        assert abs(estimate.mean() - true) < 0.012, make
        assert estimate.std() < 1.25 * np.sqrt(true * (1 - true) / 60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A Red-Brick  HOUSE, (front)!", "a red brick house front"),
        ("ＦＵＬＬ ｗｉｄｔｈ №5", "full width no5"),
        ("Straße Ünïté", "strasse ünïté"),
        ("हिन्दी में चित्र", "हिन्दी में चित्र"),
        ("一个女人 red 猫", "一个 个女 女人 red 猫"),
        ("𠀀𠀁𠀂!", "𠀀𠀁 𠀁𠀂"),
        ("… 🙂 —", ""),
    ],
)
def test_what_a_word_is(text: str, words: str) -> None:
    assert fold(text) == words
    tokens = tokenise(pa.array([text, None, "zebra " + text]))
    assert tokens.lengths.tolist() == [len(words.split()), 0, len(words.split()) + 1]


def test_ascii_and_unicode_paths_agree() -> None:
    captions = [*planted(200), "It's a TEST\twith\ntabs", "", "  ", "x"]
    plain, _, _ = as_sets(pa.array(captions))
    assert [fold(c).split() for c in captions] == _words(captions)
    assert plain.sizes.tolist() == [len(set(fold(c).split())) for c in captions]


def _words(captions: list[str]) -> list[list[str]]:
    tokens = tokenise(pa.array(captions))
    spelled = {}
    for caption in captions:
        for word in fold(caption).split():
            spelled[int(tokenise(pa.array([word])).flat[0])] = word
    return [
        [spelled[int(h)] for h in tokens.flat[a:b]] for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)
    ]


def test_keys_of_bands_are_equal_where_their_values_are(world: tuple[Path, list[str]]) -> None:
    sets, _, _ = as_sets(pa.array(world[1]))
    which = np.flatnonzero(sets.sizes >= 5)[::-1]
    values = minhash.values(sets, which, range(60))
    for rows in (2, 5):
        keys = minhash.band_keys(sets, which, rows)
        for key, band in zip(keys, values.reshape(-1, rows, len(which)), strict=True):
            _, same = np.unique(band, axis=1, return_inverse=True)
            first = np.unique(same, return_index=True)[1][same.ravel()]
            assert (key == key[first]).all()
            assert (
                len(np.unique(key)) >= len(np.unique(same)) - 3
            )  # of 6,000, one in a thousand runs loses one by chance


def test_smaller_sets_have_smaller_keys() -> None:
    sets, keys, _ = as_sets(pa.array([*planted(500), "one two", "x " * 9, " ".join(map(str, range(900)))]))
    assert (np.diff(sets.sizes[np.argsort(keys)]) >= 0).all()


def test_slices_of_arrow_arrays(world: tuple[Path, list[str]]) -> None:
    whole = pa.array(world[1][:100])
    _, keys, sequence = as_sets(whole)
    _, part, part_sequence = as_sets(whole.slice(40, 20))
    assert part.tolist() == keys[40:60].tolist() and part_sequence.tolist() == sequence[40:60].tolist()


def test_chinese_captions_match_by_pairs_of_characters(tmp_path: Path) -> None:
    rows = [
        pair("p0", "一个穿着红色泳装的女人躺在蓝色的海水里", "http://x/0"),
        pair("p1", "一个穿着红色泳装的女人躺在蓝色的海水里。", "http://x/1"),
        pair("p2", "一个穿着红色泳装的女人躺在蓝色海水里", "http://x/2"),
        pair("p3", "一对恋人在公园的河边拥抱", "http://x/3"),
    ]
    write_parts(tmp_path, rows)
    decide(tmp_path, policy="text", max_images_per_caption=1)
    found = decisions(tmp_path)
    assert kept(tmp_path) == {"p0", "p3"}
    assert found["p1"]["evidence"] == "caption" and found["p2"]["evidence"] == "minhash"


@pytest.mark.parametrize("suffix", ["parquet", "csv", "tsv.gz", "jsonl"])
def test_a_bare_table_of_captions(tmp_path: Path, suffix: str) -> None:
    captions = ['a "red" car drives down the long road', "two dogs, one ball and a lot of fun", "", ""]
    captions += ["A red car drives down the long road!", "two dogs one ball and a whole lot of fun"]
    table = _written(tmp_path, suffix, captions)
    work = tmp_path / "work"
    summary = decide(work, captions=str(table), caption_col="text")
    assert (summary["pairs"], summary["kept"]) == (6, 4)
    found = decisions(work)
    assert [found[f"{i:012d}"]["survivor"] for i in (4, 1)] == ["000000000000", "000000000005"]
    assert summary["dropped"] == {"caption_duplicate": 2}
    with pytest.raises(InputError, match=r"no column 'caption': .*'?text.*--caption-col"):
        decide(tmp_path / "other", captions=str(table))


def _written(folder: Path, suffix: str, captions: list[str]) -> Path:
    import csv
    import gzip
    import json

    path = folder / f"table.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({"text": captions}), path)
    elif suffix == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["text", "n"], *([c, "1"] for c in captions)])
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps({"text": c}) + "\n" for c in captions))
    else:
        with gzip.open(path, "wt") as file:
            file.write("text\tn\n" + "".join(f"{c}\t1\n" for c in captions))
    return path


@pytest.mark.parametrize("words", [5, 1000, 1024, 1025, 8000])
def test_captions_as_long_as_pages_are_compared_exactly_and_in_little_memory(words: int) -> None:
    pages = [" ".join(f"w{i}" for i in range(start, start + words)) for start in (0, 1, words // 2, 3 * words)]
    sets, _, _ = as_sets(pa.array(pages))
    tracemalloc.start()
    found = jaccard(sets, np.zeros(4, np.int64), np.arange(4))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    shared = np.array([words, words - 1, words - words // 2, 0])
    assert found == pytest.approx(shared / (2 * words - shared))
    assert peak < 20e6


def test_a_table_that_goes_bad_on_the_way_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"caption": ["a dog"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a dog"]}), tmp_path / "b.parquet")
    (tmp_path / "long.csv").write_bytes(b"caption,n\n" + b"a dog,1\n" * 300_000 + b"caf\xe9,2\n")
    (tmp_path / "long.jsonl").write_text('{"caption": "a dog"}\n' * 300_000 + "{\n")
    for name in ("*.parquet", "long.csv", "long.jsonl"):
        with pytest.raises(InputError, match="cannot be read; DuckDB says"):
            decide(tmp_path / "work", captions=str(tmp_path / name), fresh=True)


def test_captions_in_pieces_give_what_they_give_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    captions = pa.array([*planted(300), "", "一个女人", None, "x" * 300, "a supercalifragilistic word, twice: word"])
    whole, set_keys, caption_keys = as_sets(captions)
    monkeypatch.setattr("dedup.tokens._CAPTIONS", 7)
    parts, *keys = as_sets(captions)
    assert [k.tolist() for k in keys] == [set_keys.tolist(), caption_keys.tolist()]
    for i in range(len(captions)):
        ours, theirs = (s.flat[s.starts[i] : s.starts[i] + s.sizes[i]].tolist() for s in (parts, whole))
        assert ours == theirs


def test_words_are_told_apart_in_every_byte() -> None:
    words = ["a" * n for n in range(1, 40)] + ["a" * n + "b" + "a" * (30 - n) for n in range(31)]
    assert len(set(tokenise(pa.array(words)).flat.tolist())) == len(words)
    assert len(set(tokenise(pa.array([" ".join(words)])).flat.tolist())) == len(words)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("red dress", "Dress, red!", True),  # the same words
        ("red dress", "red shirt", False),
        ("a red summer dress", "a red summer dress sale", False),  # 4 of 5 words are 0.8, but too few to tell
        ("a long red summer dress", "a long red summer dress sale", True),
        ("photo", "photo", True),
        ("", "", False),
        ("…", "…", False),
        ("一个女人", "一个男人", False),  # three pairs of characters: a short caption
        ("红裙", "红裙!", True),
    ],
)
def test_short_captions_match_only_the_same_words(tmp_path: Path, first: str, second: str, same: bool) -> None:
    write_parts(tmp_path, [pair("a", first, "http://x/a"), pair("b", second, "http://x/b")])
    decide(tmp_path, policy="text", max_images_per_caption=1)
    assert (len(kept(tmp_path)) == 1) is same


@pytest.mark.parametrize("name", ["words?", "words*", "words[12]", "it's", "{a,b}"])
def test_a_files_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    for other in ("words1", "wordsx", "a"):
        (tmp_path / f"{other}.jsonl").write_text('{"caption": "another file"}\n' * 3)
    (tmp_path / f"{name}.jsonl").write_text('{"caption": "one two three four five"}\n')
    write_parts(tmp_path / "work", [pair("a", "one two three four five", "http://x/a")])
    summary = decide(tmp_path / "work", against=(str(tmp_path / f"{name}.jsonl"),))
    assert summary["against"][0]["items"] == summary["against"][0]["matched"] == 1

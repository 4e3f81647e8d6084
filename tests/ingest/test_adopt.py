"""Foreign shards become pairs: the same bytes at their old place, and damage becomes rows."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import InputError, WorkFolderError
from core.imagehash import image_hash
from core.images import decode, read_header
from ingest import adopt
from ingest.config import AdoptConfig
from tests.ingest.server import picture, png


def run(tmp_path: Path, shards: Path, **more: Any) -> dict[str, Any]:
    return adopt.run(AdoptConfig(shards=str(shards), work=str(tmp_path / "work"), workers=1, **more))


def parts(tmp_path: Path) -> list[dict[str, Any]]:
    paths = sorted((tmp_path / "work/ingest/parts").glob("*.parquet"))
    return pa.concat_tables([pq.read_table(path) for path in paths]).to_pylist()


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_shards_of_webdataset(tmp_path: Path) -> None:
    import webdataset

    shards = tmp_path / "shards"
    shards.mkdir()
    with webdataset.ShardWriter(str(shards / "%05d.tar"), maxcount=4, verbose=0) as writer:
        for i in range(10):
            about = {"url": f"http://a.test/{i}", "similarity": i / 10}
            writer.write({"__key__": f"sample{i:03d}", "jpg": picture(i), "txt": f"a dog &amp; {i}", "json": about})
    summary = run(tmp_path, shards)
    assert (summary["pairs"], summary["shards"], summary["ok"]) == (10, 3, 10)
    rows = parts(tmp_path)
    assert len({row["uid"] for row in rows}) == 10
    for i, row in enumerate(rows):
        with Path(row["tar"]).open("rb") as file:
            file.seek(row["tar_offset"])
            assert file.read(row["tar_size"]) == picture(i)
        assert row["tar"] == str(shards / f"{i // 4:05d}.tar")
        assert (row["caption"], row["url"]) == (f"a dog & {i}", f"http://a.test/{i}")
        assert (row["width"], row["height"], row["stored_width"]) == (96, 72, 96)
        assert row["sha256"] == hashlib.sha256(picture(i)).hexdigest()
        assert row["image_hash"] == image_hash(decode(picture(i), read_header(picture(i))))[0]
        assert row["source_key"] == f"sample{i:03d}" and json.loads(row["source_json"])["similarity"] == i / 10
    assert not list((tmp_path / "work/ingest/parts").glob("*.tar"))


def test_a_folder_of_img2dataset(tmp_path: Path) -> None:
    """Its layout: KEY.jpg, KEY.txt, KEY.json with url and caption; a parquet and a stats file beside each tar."""
    members: dict[str, bytes] = {}
    for i in range(3):
        key = f"00000{i:04d}"
        about = {"caption": f"caption {i}", "url": f"http://a.test/{i}", "key": key, "status": "success", "sha256": "0"}
        members |= {
            f"{key}.jpg": picture(i),
            f"{key}.txt": f"caption {i}".encode(),
            f"{key}.json": json.dumps(about).encode(),
        }
    tar_of(tmp_path / "shards/00000.tar", members)
    (tmp_path / "shards/00000_stats.json").write_text("{}")
    failures = {
        "HTTP Error 404: Not Found": "http_4xx", "HTTP Error 429: Too Many Requests": "http_429",
        "<urlopen error timed out>": "timeout", "<urlopen error [Errno -2] Name or service not known>": "dns",
        "Use of image disallowed by X-Robots-Tag directive": "opted_out", "image decoding error": "corrupt",
        "<urlopen error [Errno 111] Connection refused>": "connect",
    }  # fmt: skip
    table = [{"key": f"f{i}", "url": f"http://f.test/{i}", "caption": "x", "status": "failed_to_download",
              "error_message": message} for i, message in enumerate(failures)]  # fmt: skip
    table.append({**table[0], "key": "000000000", "status": "success", "error_message": ""})
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "shards/00000.parquet")
    assert run(tmp_path, tmp_path / "shards")["ok"] == 3
    rows = parts(tmp_path)
    assert [row["url"] for row in rows[:3]] == [f"http://a.test/{i}" for i in range(3)]
    assert [row["outcome"] for row in rows[3:]] == list(failures.values())


def test_a_parquet_of_someone_else_beside_a_tar_is_no_harm(tmp_path: Path) -> None:
    tar_of(tmp_path / "shards/0.tar", {"x.jpg": picture(9), "x.txt": b"whole"})
    (tmp_path / "shards/0.parquet").write_bytes(b"PAR1 or not")
    assert run(tmp_path, tmp_path / "shards")["pairs"] == 1


def test_samples_that_lack_something_get_outcomes(tmp_path: Path) -> None:
    members = {
        "a/whole.v2.png": png(40, 40), "a/whole.txt": b"dots in names", "nopic.txt": b"caption only",
        "nocap.jpg": picture(1), "broken.jpg": picture(2)[:-200], "broken.txt": b"half", "tiny.png": png(3, 3),
        "tiny.txt": b"tiny", "json.jpg": picture(3), "json.json": b'{"caption": "from json", "uid": "own-uid"}',
        "bad.jpg": picture(4), "bad.json": b"{", "bad.txt": b"bad json", "README": b"not a sample",
    }  # fmt: skip
    tar_of(tmp_path / "shards/0.tar", members)
    run(tmp_path, tmp_path / "shards")
    rows = {row["source_key"]: row for row in parts(tmp_path)}
    assert {key: row["outcome"] for key, row in rows.items()} == {
        "a/whole": "ok", "nopic": "not_image", "nocap": "empty_caption", "broken": "truncated", "tiny": "too_small",
        "json": "ok", "bad": "ok", "README": "not_image",
    }  # fmt: skip
    assert (rows["json"]["caption"], rows["json"]["uid"]) == ("from json", "own-uid")


@pytest.mark.parametrize("damage", ["cut in a member", "cut at a member", "garbage header", "not a tar", "empty"])
def test_damaged_tars_become_rows(tmp_path: Path, damage: str) -> None:
    members: dict[str, bytes] = {}
    for i in range(4):
        members |= {f"{i}.jpg": picture(i), f"{i}.txt": b"caption"}
    path = tar_of(tmp_path / "shards/0.tar", members)
    body = path.read_bytes()
    with tarfile.open(path) as tar:
        third = tar.getmember("2.jpg")
        at, data = third.offset, third.offset_data
    damaged = {
        "cut in a member": body[: data + 100], "cut at a member": body[:at], "not a tar": b"x" * 4096, "empty": b"",
        "garbage header": body[:at] + np.random.Generator(np.random.PCG64(0)).bytes(512) + body[at + 512 :],
    }  # fmt: skip
    path.write_bytes(damaged[damage])
    tar_of(tmp_path / "shards/1.tar", {"x.jpg": picture(9), "x.txt": b"whole"})
    summary = run(tmp_path, tmp_path / "shards")
    outcomes = [row["outcome"] for row in parts(tmp_path)]
    assert outcomes.count("ok") == (3 if "cut" in damage or "header" in damage else 1) == summary["ok"]
    assert outcomes[-2] == "truncated" and "tar: " in parts(tmp_path)[-2]["detail"]


def test_a_finished_adoption_is_not_repeated_and_shares_no_folder(tmp_path: Path) -> None:
    tar_of(tmp_path / "shards/0.tar", {"x.jpg": picture(9), "x.txt": b"whole"})
    assert run(tmp_path, tmp_path / "shards") == run(tmp_path, tmp_path / "shards")
    from ingest import fetch
    from ingest.config import IngestConfig

    (tmp_path / "list.txt").write_text("http://a.test/1\n")
    with pytest.raises(WorkFolderError, match="pairmill adopt"):
        fetch.run(IngestConfig(urls=str(tmp_path / "list.txt"), work=str(tmp_path / "work")))


def test_a_folder_without_tars(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    with pytest.raises(InputError, match=r"\.tar"):
        run(tmp_path, tmp_path / "shards")


def test_text_that_utf8_cannot_hold_harms_nothing(tmp_path: Path) -> None:
    """JSON may hold half a pair of surrogates, and a tar's names any bytes: two such names stay two samples."""
    about = b'{"caption": "half \\ud83d", "url": "http://\\ud83d", "uid": "\\ud83d", "\\ud83d": 1}'
    one, two = "caf\udce9", "caf\udcea"
    members = {
        f"{one}.jpg": picture(1),
        f"{one}.json": about,
        f"{two}.jpg": picture(2),
        f"{two}.txt": b"x \xff",
    }
    members |= {"deep.jpg": picture(3), "deep.txt": b"deep", "deep.json": b"[" * 100_000}
    tar_of(tmp_path / "shards/00000.tar", members)
    run(tmp_path, tmp_path / "shards")
    rows = parts(tmp_path)
    assert [(row["source_key"], row["caption"]) for row in rows] == [
        ("caf?", "half ?"),
        ("caf?", "x \ufffd"),
        ("deep", "deep"),
    ]
    assert [row["sha256"] for row in rows] == [hashlib.sha256(picture(i)).hexdigest() for i in (1, 2, 3)]
    assert len({row["uid"] for row in rows}) == 3


@pytest.mark.parametrize("about", [{"uid": "one"}, {"url": "http://a.test/1"}])
def test_pairs_of_different_tars_never_share_a_uid(tmp_path: Path, about: dict[str, str]) -> None:
    for tar in range(3):
        members = {f"{i}.{kind}": data for i in range(2) for kind, data in
                   (("jpg", picture(i)), ("txt", b"x"), ("json", json.dumps(about).encode()))}  # fmt: skip
        tar_of(tmp_path / f"shards/{tar:05d}.tar", members)
    run(tmp_path, tmp_path / "shards")
    rows = parts(tmp_path)
    assert len({row["uid"] for row in rows}) == 6
    assert rows[0]["uid"] == about.get("uid", rows[0]["uid"])
    # a part that got lost is made again, and nothing else changes
    (tmp_path / "work/ingest/parts/u000001.parquet").unlink()
    assert run(tmp_path, tmp_path / "shards")["pairs"] == 6
    assert parts(tmp_path) == rows


def test_the_picture_itself_goes_before_what_lies_beside_it(tmp_path: Path) -> None:
    members = {
        "a.mask.png": png(96, 72),
        "a.image.jpg": picture(1),
        "a.note.txt": b"beside",
        "a.jpg": picture(2),
        "a.txt": b"x",
    }
    members |= {"b.image.jpg": picture(3), "b.caption.txt": b"only one"}
    tar_of(tmp_path / "shards/00000.tar", members)
    run(tmp_path, tmp_path / "shards")
    rows = parts(tmp_path)
    assert [row["caption"] for row in rows] == ["x", "only one"]
    assert [row["sha256"] for row in rows] == [hashlib.sha256(picture(i)).hexdigest() for i in (2, 3)]

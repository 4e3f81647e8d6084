"""The files beside the tars: DALI's index, and the list of shards there and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import DataError, InputError
from core.storage import Folder
from shardkit.index import Shard, ShardList, read_shard_list, split_name


def test_names_split_at_the_first_dot_of_the_last_segment() -> None:
    assert split_name("a.b/c.jpg") == ("a.b/c", "jpg")
    assert split_name("c.seg.png") == ("c", "seg.png")
    assert split_name("README") == ("README", "")


def test_the_list_of_shards_goes_there_and_back(tmp_path: Path) -> None:
    listed = ShardList(
        [Shard("00000.tar", 3, 4096, "ab"), Shard("00001.tar", 2, 2048, "cd")], {"seed": 1}, [{"list": "x"}]
    )
    folder = Folder(tmp_path)
    with pytest.raises(InputError, match=r"expected shards\.json .* run `pairmill shard` first"):
        read_shard_list(folder)
    folder.write("shards.json", listed.dump())
    assert read_shard_list(folder) == listed
    assert (listed.samples, listed.total_bytes) == (5, 6144)
    folder.write("shards.json", b'{"shards": [{"name": 1}]}')
    with pytest.raises(DataError, match="expected the list of shards"):
        read_shard_list(folder)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", '{"shards": 3}', '{"shards": [3]}', '{"shards": [{"name": "a.tar"}]}',
        '{"shards": [{"name": 5, "samples": 1, "bytes": 2}]}', '{"shards": [{"name": "a", "samples": "1", "bytes": 2}]}',
        '{"shards": [{"name": "a", "samples": 1, "bytes": -2}]}', '{"shards": [{"name": "a", "samples": true, "bytes": 2}]}',
        '{"shards": [{"name": "a", "samples": 1, "bytes": 2, "sha256": null}]}',
    ],
)  # fmt: skip
def test_a_damaged_list_of_shards_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "shards.json").write_text(text)
    with pytest.raises(DataError, match=r"expected the list of shards in .*shards\.json"):
        read_shard_list(Folder(tmp_path))

"""Remote shards: few requests, one copy for all ranks of a machine, a cap, and nothing believed unseen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from core.errors import ConfigError
from core.storage import Folder
from shardkit import cache as cache_module
from shardkit.cache import ShardCache
from shardkit.config import ShardConfig
from shardkit.pack import run as pack
from shardkit.reader import BatchReader, EpochOrder, ShardSet
from tests.ingest.test_object_store import bucket  # noqa: F401
from tests.shardkit.parts import small_world

ALL = np.arange(46)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = small_world(tmp_path_factory.mktemp("cache")).write()
    pack(ShardConfig(work=str(work), workers=1, samples_per_shard=7))
    return work / "shards"


@pytest.fixture
def remote(bucket: str, local: Path) -> str:  # noqa: F811
    for path in local.iterdir():
        if path.is_file():
            Folder(bucket).write(f"shards/{path.name}", path.read_bytes())
    return f"{bucket}/shards"


def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards asked for from now on, a request each."""
    asked: list[str] = []
    real = Folder.read_range

    def counted(self: Folder, name: str, offset: int, size: int) -> bytes:
        asked.append(name)
        return real(self, name, offset, size)

    monkeypatch.setattr(Folder, "read_range", counted)
    return asked


def test_an_epoch_from_a_store_is_one_request_a_shard(
    remote: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(monkeypatch)
    far = ShardSet.open(remote, cache=ShardCache(tmp_path / "c", 1 << 30))
    order = EpochOrder(far.shard_sizes, 0, 0, 4, 4)
    for ranks in (1, 2):  # the second time as two ranks that share the folder, and need nothing more
        parts = []
        for rank in range(ranks):
            own = ShardSet.open(remote, cache=ShardCache(tmp_path / "c", 1 << 30))
            with BatchReader(own, order, rank, ranks) as reader:
                parts += [sample for batch in reader for sample in batch.samples]
        assert all(sample.ok for sample in parts) and len(parts) == 44
        assert {s.uid: s.data for s in parts}.items() <= {s.uid: s.data for s in ShardSet.open(local).read(ALL)}.items()
        assert sorted(asked) == sorted(shard.name for shard in far.shards)


def test_ranks_that_want_the_same_shard_at_once_fetch_it_once(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(monkeypatch)
    sets = [ShardSet.open(remote, cache=ShardCache(tmp_path / "c", 1 << 30)) for _ in range(3)]
    threads = [threading.Thread(target=one.read, args=(np.arange(5),)) for one in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == ["00000.tar"]


def test_the_cache_keeps_its_cap_and_drops_the_longest_unused(local: Path, tmp_path: Path) -> None:
    far, cache = Folder(local), ShardCache(tmp_path / "c", 0)
    shards = ShardSet.open(local).shards
    cache.most = 3 * max(shard.bytes for shard in shards)
    for shard in shards[:3]:
        os.utime(cache.local(far, shard), ns=(shards.index(shard), shards.index(shard)))
    cache.local(far, shards[0])  # used again
    cache.local(far, shards[3])
    held = {path.stem for path in (tmp_path / "c").glob("*.tar")}
    assert held == {shards[i].sha256 for i in (0, 2, 3)}
    assert sum(path.stat().st_size for path in (tmp_path / "c").glob("*.tar")) <= cache.most
    with pytest.raises(ConfigError, match=r"larger than the cache of 0.00 GB; raise --cache-gb"):
        ShardCache(tmp_path / "tiny", 100).local(far, shards[0])


def test_what_rots_in_the_cache_is_fetched_again(remote: str, local: Path, tmp_path: Path) -> None:
    far = ShardSet.open(remote, cache=ShardCache(tmp_path / "c", 1 << 30))
    far.read(ALL)
    for path in (tmp_path / "c").glob("*.tar"):
        data = bytearray(path.read_bytes())
        data[600:900] = bytes(300)  # in the first picture
        path.write_bytes(data)
    again = far.read(ALL)
    assert all(sample.ok for sample in again)
    assert [s.data for s in again] == [s.data for s in ShardSet.open(local).read(ALL)]


def test_a_shard_that_is_not_what_the_list_says_is_not_kept(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "PAUSE_S", 0.0)
    far = ShardSet.open(remote, cache=ShardCache(tmp_path / "c", 1 << 30))
    data = bytearray(Folder(remote).read("00002.tar"))
    data[-2000] ^= 1  # in the end marker, where no picture lies
    Folder(remote).write("00002.tar", bytes(data))
    samples = far.read(ALL)
    bad = [s for s in samples if not s.ok]
    assert {s.shard for s in bad} == {"00002.tar"} and len(bad) == far.shard_sizes[2]
    assert "what came is not what the list says" in bad[0].reason
    assert len(list((tmp_path / "c").glob("*.tar"))) == len(far.shards) - 1


_KILLED = """
import os, signal, sys
from pathlib import Path
from core.storage import Folder
from shardkit import cache
from shardkit.reader import ShardSet
cache.RANGE = 4096
real, seen = Folder.read_range, []
def dying(self, name, offset, size):
    seen.append(name)
    if len(seen) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, name, offset, size)
Folder.read_range = dying
far = Folder(sys.argv[1])
for shard in ShardSet.open(sys.argv[1]).shards:
    cache.ShardCache(Path(sys.argv[2]), 1 << 30).local(far, shard)
"""


def test_a_fetch_that_is_killed_leaves_nothing_that_is_believed(local: Path, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(local), str(tmp_path / "c")], check=False)
    assert killed.returncode == -signal.SIGKILL
    shards = ShardSet.open(local).shards
    parts = list((tmp_path / "c").glob("*.part"))
    assert len(parts) == 1
    cache = ShardCache(tmp_path / "c", 1 << 30)
    for shard in shards:
        assert cache.local(Folder(local), shard).read_bytes() == (local / shard.name).read_bytes()
    assert not list((tmp_path / "c").glob("*.part"))


_STARVED = """
import sys
from pathlib import Path
from shardkit import reader
far = reader.ShardSet.open(sys.argv[1], cache=reader.ShardCache(Path(sys.argv[2]), 1 << 30))
print("open", flush=True)
sys.stdin.readline()
with reader.BatchReader(far, reader.EpochOrder(far.shard_sizes, 0, 0, 4, 4), timeout_s=0.5) as batches:
    next(iter(batches))
"""


def test_a_store_that_never_answers_is_named_and_holds_up_no_end(local: Path, tmp_path: Path) -> None:
    """The server is stopped, as a machine is that has lost its network: it takes the connection and says nothing."""
    serve = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "-d", str(local)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().split()[5]
            command = [sys.executable, "-c", _STARVED, f"http://127.0.0.1:{port}", str(tmp_path / "c")]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **pipes) as ours:
                assert ours.stdout is not None and ours.stdout.readline() == "open\n"
                server.send_signal(signal.SIGSTOP)
                _, words = ours.communicate("\n", timeout=100)
        finally:
            server.kill()
    assert "rank 0 starved in stage read: batch 0 did not come within 0.5 s, reading 0000" in words
    assert ours.returncode == 1

"""The pages as a browser gets them, from a real server."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from core.errors import InputError, RunError
from report import browse
from report.config import BrowseConfig
from tests.report.folder import HOSTILE, make_work, uid


@pytest.fixture(scope="module")
def server(work: Path) -> Iterator[browse.Server]:
    server = browse.start(BrowseConfig(work=str(work), port=0))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def get(server: browse.Server, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(server.url.rstrip("/") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def page(server: browse.Server, name: str, **query: str | int) -> str:
    status, _, body = get(server, f"/{name}?{urllib.parse.urlencode(query)}")
    assert status == 200, body
    return body.decode()


def refused(server: browse.Server, name: str, where: str) -> str:
    status, _, body = get(server, f"/{name}?{urllib.parse.urlencode({'where': where})}")
    assert status == 400
    return unescape(re.sub("<[^>]*>", " ", body.decode()))


def pictures(source: str) -> list[str]:
    return re.findall(r'<img src="/picture/([0-9a-f]{32})"', source)


def test_every_pair_is_on_exactly_one_page(server: browse.Server) -> None:
    first, second = page(server, "pairs"), page(server, "pairs", page=2)
    assert "72 pairs" in first and "page 1 of 2" in first and "on →" in first
    assert "page 2 of 2" in second and "on →" not in second
    assert (first.count('class="url"'), second.count('class="url"')) == (48, 24)
    assert set(pictures(first) + pictures(second)) == {uid(i) for i in range(60)}


def test_conditions_choose_over_pairs_and_decisions(server: browse.Server) -> None:
    assert pictures(page(server, "pairs", where="caption LIKE '%ball number 11 %' -- a remark")) == [uid(11)]
    rule = page(server, "dropped", where="reason = 'align:aspect'")
    assert "4 pairs" in rule and pictures(rule) == [uid(i) for i in range(40, 44)]
    copies = page(server, "dropped", where="reason LIKE '%duplicate' AND similarity > 0.9")
    assert "10 pairs" in copies
    assert pictures(copies)[:2] == [uid(30), uid(0)]  # the copy, and beside it the pair that stands for it
    failed = page(server, "pairs", where="outcome <> 'ok'")
    assert not pictures(failed) and "404 &lt;b&gt;Not&lt;/b&gt; Found" in failed


def test_clusters_with_their_members(server: browse.Server) -> None:
    source = page(server, "clusters", where="size > 2")
    assert "1 cluster" in source
    assert sorted(pictures(source)) == sorted(uid(i) for i in (0, 1, 2, 30, 31, 32))


def test_a_picture_is_served_as_what_it_is(server: browse.Server) -> None:
    status, headers, body = get(server, f"/picture/{uid(7)}")
    assert status == 200 and body.startswith(b"\xff\xd8\xff")
    assert headers["Content-Type"] == "image/jpeg" and headers["X-Content-Type-Options"] == "nosniff"
    for name in (uid(1000), "nothing", "..%2F..%2Fpairmill.toml", "x'%20OR%20'1'='1"):
        assert get(server, f"/picture/{name}")[0] == 404


def test_a_hostile_caption_stays_text(server: browse.Server) -> None:
    query = urllib.parse.urlencode({"where": f"uid = '{uid(7)}'"})
    status, headers, body = get(server, f"/pairs?{query}")
    assert status == 200 and HOSTILE in unescape(body.decode())
    assert b"<script" not in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    echoed = page(server, "pairs", where="caption <> '\"><script>alert(1)</script>'")
    assert "<script" not in echoed


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nothing = 1", "nothing"),
        ("1 = 1; COPY (SELECT 1) TO 'stolen.csv'", "DuckDB"),
        ("1 = 1); COPY (SELECT 1) TO 'stolen.csv'; SELECT (1", "only reads"),
        ("EXISTS (FROM read_text('/etc/passwd'))", "Permission"),
        ("caption::INT > 1", "Could not convert"),
        ("(", "DuckDB"),
    ],
)
def test_a_condition_only_reads_and_only_here(server: browse.Server, where: str, words: str) -> None:
    assert words in refused(server, "pairs", where)


def test_the_report_is_there_and_nothing_else(server: browse.Server) -> None:
    assert "pairmill report" in page(server, "report")
    for path in ("/passwd", "/pairs/../../etc", "/picture"):
        assert get(server, path)[0] == 404


def test_another_hosts_name_is_refused(server: browse.Server) -> None:
    """A page of the web may point a name of its own at 127.0.0.1, but not change what its requests name."""
    assert get(server, "/pairs", Host="evil.example")[0] == 403
    assert get(server, "/pairs", Host=f"localhost:{server.server_address[1]}")[0] == 200


def test_a_folder_that_is_only_ingested(tmp_path: Path) -> None:
    site = browse.Site(browse.Folder(make_work(tmp_path / "it's", upto="ingest")))
    assert b"72 pairs" in site.answer("/pairs", {}).body
    assert b"/dropped" not in site.answer("/", {}).body
    assert site.answer("/dropped", {}).status == 404


def test_nothing_to_browse_and_no_free_port(tmp_path: Path, server: browse.Server) -> None:
    with pytest.raises(InputError, match="pairmill ingest"):
        browse.start(BrowseConfig(work=str(tmp_path), port=0))
    with pytest.raises(RunError, match="--port"):
        browse.start(BrowseConfig(work=str(server.site.folder), port=server.server_address[1]))

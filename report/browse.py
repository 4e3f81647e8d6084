"""`browse`: the report, and page by page every pair, dropped pair and cluster behind it, by any SQL condition.

It only reads, answers on loopback unless told otherwise, and sends no script: captions and URLs are strangers' words, and
stay words. Requests that name another host are refused, so that no web page can reach in through a name of its own.
"""

from __future__ import annotations

import html as escaping
import http.server
import ipaddress
import logging
import threading
import urllib.parse
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from core import catalog
from core.errors import InputError, PairmillError, RunError, UsageError
from core.storage import Folder
from report import html, sections
from report import run as report
from report.audit import views
from report.charts import number
from report.markup import Child, Markup, tag
from report.sql import _require_reading

if TYPE_CHECKING:
    import duckdb

    from report.config import BrowseConfig

log = logging.getLogger("pairmill.report")
PAGE = 48  # pairs
CLUSTERS = 12  # clusters
MEMBERS = 24  # of a cluster in a list of clusters
CAPTION_CHARS = 400
POLICY = "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'self'"
# What a browser may take for a picture; anything else in a tar is not handed out.
PICTURES = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n", "image/png"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)
EXAMPLES = {
    "pairs": ("outcome = 'ok'", "caption ILIKE '%dog%' AND width > 800", "outcome = 'timeout'"),
    "dropped": ("reason LIKE '%duplicate'", "similarity < 0.9", "length(caption) < 20"),
    "clusters": ("size > 3",),
}


def run(config: BrowseConfig) -> dict[str, Any]:
    """Serve until Ctrl-C; returns {url, requests}.

    Raises:
        InputError: the work folder holds nothing to look at.
        RunError: the address is not free.
    """
    server = start(config)
    log.info("%s (Ctrl-C ends it)", server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return {"url": server.url, "requests": server.requests}


def start(config: BrowseConfig) -> Server:
    """The server, bound and not yet serving."""
    site = Site(Folder(config.work))
    try:
        server = Server((config.host, config.port), site)
    except OSError as error:
        raise RunError(
            f"cannot serve on {config.host}:{config.port}: {error.strerror or error}; choose another --port"
        ) from error
    if not _is_loopback(config.host):
        log.warning("anyone who reaches %s can look at this work folder", server.url)
    return server


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# ---------------------------------------------------------------- what is shown


@dataclass(frozen=True)
class Answer:
    """Of one request."""

    body: bytes
    kind: str = "text/html; charset=utf-8"
    status: int = 200
    policy: str = POLICY


class Site:
    """The pages of one work folder, made anew for each request."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._connection = catalog.connect(folder)
        self._have = views(self._connection)
        if "pairs" not in self._have:
            raise InputError(f"{folder} holds no pairs to browse yet; run `pairmill ingest` or `pairmill adopt` first")
        self._shut_in()

    def _shut_in(self) -> None:
        """Let conditions read nothing but this folder, and change no setting."""
        if self.folder.local is None:
            return
        home = str(self.folder.local.absolute()).replace("'", "''")
        for setting in (
            f"allowed_directories = ['{home}']",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        """The page at `path`, with the parameters of its URL."""
        name = path.strip("/")
        if name.startswith("picture/"):
            return self._picture(name.removeprefix("picture/"))
        if name == "report":
            page = html.render(report.collect(self.folder))
            return Answer(page.encode("utf-8", "replace"), policy="")  # it brings a stricter policy of its own
        pages = {"": "pairs", "pairs": "pairs", "dropped": "dropped", "clusters": "clusters"}
        if name not in pages or (pages[name] != "pairs" and "decisions" not in self._have):
            return _page("pairs", "", tag("p", "There is no such page here."), self._names(), status=404)
        where, at = query.get("where", "").strip(), _whole(query.get("page", "1"))
        kind = pages[name]
        try:
            body = self._clusters(where, at) if kind == "clusters" else self._pairs(kind, where, at)
        except PairmillError as error:
            return _page(kind, where, tag("p", str(error), role="alert"), self._names(), status=400)
        return _page(kind, where, body, self._names())

    def _names(self) -> list[str]:
        return ["pairs", *(["dropped", "clusters"] if "decisions" in self._have else [])]

    def _rows(self, sql: str) -> list[dict[str, Any]]:
        connection: duckdb.DuckDBPyConnection = self._connection.cursor()  # requests come in several threads
        _require_reading(connection, sql)
        cursor = catalog.query(connection, sql)
        return _fetched(cursor)

    def _source(self) -> str:
        """Pairs with what dedup decided about them, for conditions over both."""
        if "decisions" not in self._have:
            return "(SELECT * FROM pairs)"
        return (
            "(SELECT p.*, d.* EXCLUDE (uid) FROM pairs p LEFT JOIN decisions d ON p.uid = d.uid AND p.outcome = 'ok')"
        )

    def _pairs(self, kind: str, where: str, at: int) -> Child:
        conditions = [f"({where}\n)"] if where else []
        conditions += ["kept = false"] if kind == "dropped" else []
        chosen = f"FROM {self._source()} WHERE {' AND '.join(conditions) or 'true'}"
        (total,) = self._rows(f"SELECT count(*) AS rows {chosen}")
        rows = self._rows(f"SELECT * {chosen} ORDER BY uid, row LIMIT {PAGE} OFFSET {(at - 1) * PAGE}")
        survivors = self._named([row["survivor"] for row in rows if row.get("survivor")])
        cards = [_card(row, survivors.get(row.get("survivor") or "")) for row in rows]
        return [
            _count(total["rows"], "pair"), tag("ul", cards, class_="cards"), _pager(kind, where, at, PAGE, total["rows"]),
        ]  # fmt: skip

    def _named(self, uids: list[str]) -> dict[str, dict[str, Any]]:
        if not uids:
            return {}
        return {
            row["uid"]: row for row in self._members(f"uid IN ({', '.join(map(_literal, uids))}) AND outcome = 'ok'")
        }

    def _members(self, condition: str) -> list[dict[str, Any]]:
        return self._rows(f"SELECT * FROM {self._source()} WHERE {condition} ORDER BY kept DESC, uid")

    def _clusters(self, where: str, at: int) -> Child:
        sized = "SELECT cluster, count(*) AS size FROM decisions WHERE cluster IS NOT NULL GROUP BY 1 HAVING size > 1"
        chosen = f"FROM ({sized}) WHERE " + (f"({where}\n)" if where else "true")
        (total,) = self._rows(f"SELECT count(*) AS rows {chosen}")
        page = self._rows(
            f"SELECT cluster, size {chosen} ORDER BY size DESC, cluster LIMIT {CLUSTERS} OFFSET {(at - 1) * CLUSTERS}"
        )
        groups = []
        for one in page:
            members = self._members(f"cluster = {_literal(one['cluster'])}")[:MEMBERS]
            heading = tag("h4", f"{number(one['size'])} pairs", tag("span", one["cluster"][:12]))
            more = one["size"] - len(members)
            rest = (
                _link("pairs", f"cluster = {_literal(one['cluster'])}", 1, f"and {number(more)} more")
                if more > 0
                else None
            )
            cards = tag(
                "ul",
                [sections.member(_shown(m)) for m in members],
                tag("li", rest) if rest else None,
                class_="cards small",
            )
            groups.append(tag("div", heading, cards, class_="group"))
        return [
            _count(total["rows"], "cluster"), tag("div", groups), _pager("clusters", where, at, CLUSTERS, total["rows"]),
        ]  # fmt: skip

    def _picture(self, uid: str) -> Answer:
        """The stored picture of a pair."""
        rows = self._rows(
            f"SELECT tar, tar_offset, tar_size FROM pairs WHERE uid = {_literal(uid)} AND outcome = 'ok' LIMIT 1"
        )
        body = b""
        if rows and rows[0]["tar"] is not None:
            try:
                body = self.folder.read_range(rows[0]["tar"], rows[0]["tar_offset"], rows[0]["tar_size"])
            except OSError as error:
                log.warning("no picture of %s: %s", uid, error)
        for magic, kind in PICTURES:
            if body.startswith(magic):
                return Answer(body, kind, policy="default-src 'none'")
        return Answer(b"no picture", "text/plain; charset=utf-8", 404)


def _fetched(cursor: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    import duckdb

    names = [column[0] for column in cursor.description or []]
    try:
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    except duckdb.Error as error:  # a cast or an overflow is found only while rows are made
        raise UsageError(f"DuckDB cannot run the query: {error}") from error


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _whole(words: str) -> int:
    return max(1, int(words)) if words.isascii() and words.isdigit() and len(words) < 10 else 1


# ---------------------------------------------------------------- markup


def _page(kind: str, where: str, body: Child, names: list[str], status: int = 200) -> Answer:
    style = (resources.files("report") / "page.css").read_text(encoding="utf-8")
    links = [
        tag("a", name, href=f"/{name}", aria_current="page" if name == kind else None) for name in (*names, "report")
    ]
    examples = [_link(kind, words, 1, tag("code", words)) for words in EXAMPLES[kind]]
    words = {
        "name": "where",
        "value": where,
        "placeholder": "an SQL condition",
        "autocomplete": "off",
        "spellcheck": "false",
    }
    form = tag(
        "form", tag("label", tag("span", "Show where"), tag("input", **words)), tag("button", "Show"),
        tag("p", "for example ", examples, class_="quiet"), action=f"/{kind}", method="get", role="search", class_="ask",
    )  # fmt: skip
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{kind} · pairmill browse"),
        Markup(f"<style>{style}</style>"),
    ]
    whole = tag(
        "body", tag("nav", links, aria_label="Pages"),
        tag("main", tag("section", tag("h2", kind.capitalize()), form, body)),
    )  # fmt: skip
    text = "<!doctype html>\n" + tag("html", tag("head", head), whole, lang="en") + "\n"
    return Answer(text.encode("utf-8", "replace"), status=status)


def _link(kind: str, where: str, at: int, words: Child, **more: Any) -> Markup:
    query = {**({"where": where} if where else {}), **({"page": at} if at > 1 else {})}
    return tag("a", words, href=f"/{kind}" + ("?" + urllib.parse.urlencode(query) if query else ""), **more)


def _pager(kind: str, where: str, at: int, each: int, total: int) -> Child:
    last = max(1, -(-total // each))
    return tag(
        "p",
        _link(kind, where, at - 1, "← back", rel="prev") if at > 1 else None, f" page {number(at)} of {number(last)} ",
        _link(kind, where, at + 1, "on →", rel="next") if at < last else None, class_="quiet",
    )  # fmt: skip


def _count(rows: int, what: str) -> Markup:
    return tag("p", f"{number(rows)} {what}{'s' * (rows != 1)}", class_="quiet", role="status")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as `sections` draws pairs."""
    caption = row["caption"] or ""
    if len(caption) > CAPTION_CHARS:
        caption = caption[:CAPTION_CHARS] + "…"
    fetched = row["outcome"] == "ok"
    picture = f"/picture/{urllib.parse.quote(row['uid'], safe='')}" if fetched else None
    return {**row, "caption": caption, "picture": picture, "kept": bool(row.get("kept", fetched))}


def _card(row: dict[str, Any], survivor: dict[str, Any] | None) -> Markup:
    size = f"{row['width']} x {row['height']}" if row.get("width") else None
    state = (
        row["outcome"] if row["outcome"] != "ok" else row.get("reason") or ("held out" if row.get("holdout") else None)
    )
    facts = " · ".join(str(word) for word in (state, row.get("detail"), size, row.get("lang")) if word)
    note = [tag("p", tag("small", facts)), tag("p", tag("small", (row["url"] or "")[:300]), class_="url")]
    return sections.card({**_shown(row), "survivor": _shown(survivor) if survivor else None}, note)


# ---------------------------------------------------------------- serving


class Server(http.server.ThreadingHTTPServer):
    """Answers GET and HEAD from a `Site`."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], site: Site) -> None:
        super().__init__(address, Handler)
        self.site, self.requests = site, 0
        self.checked = _is_loopback(address[0])
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "pairmill", ""

    def do_GET(self) -> None:
        self._send(self._answer())

    def do_HEAD(self) -> None:
        self._send(self._answer())

    def _answer(self) -> Answer:
        with self.server.lock:
            self.server.requests += 1
        host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if self.server.checked and not _is_loopback(host):
            return _words(403, "This server answers to its own address only.")
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        try:
            return self.server.site.answer(urllib.parse.unquote(url.path), query)
        except PairmillError as error:
            return _words(500, str(error))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        headers = {
            "Content-Type": answer.kind, "Content-Length": str(len(answer.body)), "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer", "Cache-Control": "no-store", "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }  # fmt: skip
        if answer.policy:
            headers["Content-Security-Policy"] = answer.policy
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _words(status: int, words: str) -> Answer:
    return Answer(escaping.escape(words).encode(), status=status)

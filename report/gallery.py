"""Sample pictures for the report: chosen in DuckDB, read from the staged tars, re-encoded small."""

from __future__ import annotations

import base64
import io
import logging
import warnings
from typing import TYPE_CHECKING, Any

from core import catalog
from core.storage import Folder
from report.audit import _records, views

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger("pairmill.report")
SIDE = 168  # twice the size at which the page shows them, for sharp phones
QUALITY = 68
CAPTION_CHARS = 240
UNDECIDED = "SELECT true AS kept, NULL AS reason, NULL AS survivor, NULL AS evidence, NULL AS similarity"


class Thumbnails:
    """Small JPEGs as data URLs, while the budget in bytes lasts."""

    def __init__(self, folder: Folder, budget: int) -> None:
        self.folder, self.left = folder, budget
        self._made: dict[tuple[str, int], str | None] = {}

    def of(self, row: dict[str, Any]) -> str | None:
        """Picture of a row with tar, tar_offset and tar_size; None where there is none, or no budget left."""
        if row.get("tar") is None or row.get("tar_offset") is None:
            return None
        place = (row["tar"], row["tar_offset"])
        if place not in self._made:
            self._made[place] = self._make(*place, row["tar_size"])
        return self._made[place]

    def _make(self, tar: str, offset: int, size: int) -> str | None:
        try:
            return self.encode(self.folder.read_range(tar, offset, size))
        except OSError as error:  # a tar that went away costs its pictures, not the page
            log.warning("no sample pictures from %s: %s", tar, error)
            return None

    def encode(self, body: bytes) -> str | None:
        """`body` as a small data URL; None where it cannot be decoded, or no budget is left."""
        from PIL import Image, ImageOps

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                opened = Image.open(io.BytesIO(body))
                opened.draft("RGB", (SIDE, SIDE))
                image = ImageOps.exif_transpose(opened).convert("RGB")
            image.thumbnail((SIDE, SIDE))
        except Exception as error:  # any decoder may fail in any way on a foreign picture
            log.debug("a sample picture cannot be decoded: %s", error)
            return None
        out = io.BytesIO()
        image.save(out, "JPEG", quality=QUALITY, optimize=True)
        url = "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
        if len(url) > self.left:
            return None
        self.left -= len(url)
        return url


def kept(connection: duckdb.DuckDBPyConnection, thumbnails: Thumbnails, count: int) -> list[dict[str, Any]]:
    """A random sample of the pairs that stay, in the form of `dropped`; of all fetched ones before dedup ran.

    Empty where no picture is at hand. Which pairs are shown depends on their uids only.
    """
    have = views(connection)
    if "pairs" not in have or not {"uid", "tar"} <= set(catalog.columns(connection, "pairs")):
        return []
    source = "decisions WHERE kept" if "decisions" in have else "pairs WHERE outcome = 'ok' AND tar IS NOT NULL"
    (found,) = _records(connection, f"SELECT count(*) AS rows, arg_min(uid, hash(uid), {count}) AS uids FROM {source}")
    details = _details(connection, found["uids"] or [])
    pairs = [{**_shown(details[uid], thumbnails), "survivor": None} for uid in found["uids"] or [] if uid in details]
    return [{"reason": "kept", "rows": found["rows"], "pairs": pairs}] if pairs else []


def dropped(connection: duckdb.DuckDBPyConnection, thumbnails: Thumbnails, each: int) -> list[dict[str, Any]]:
    """Sample pairs of every reason, {reason, rows, pairs: [{caption, url, picture, evidence, similarity, survivor}]}.

    Which pairs are shown depends on their uids only, so that two reports of one folder agree.
    """
    have = views(connection)
    if not {"pairs", "decisions"} <= have:
        return []
    reasons = _records(
        connection,
        f"""SELECT reason, count(*) AS rows, arg_min(uid, hash(uid), {each}) AS uids FROM decisions
        WHERE NOT kept GROUP BY 1 ORDER BY rows DESC, reason""",
    )
    wanted = [uid for reason in reasons for uid in reason["uids"]]
    found = _details(connection, wanted)
    survivors = _details(connection, [row["survivor"] for row in found.values() if row["survivor"]])
    out = []
    for reason in reasons:
        pairs = []
        for uid in reason["uids"]:
            if uid in found:
                pair = _shown(found[uid], thumbnails)
                survivor = survivors.get(found[uid]["survivor"])
                pairs.append({**pair, "survivor": _shown(survivor, thumbnails) if survivor else None})
        out.append({"reason": reason["reason"], "rows": reason["rows"], "pairs": pairs})
    return out


def clusters(
    connection: duckdb.DuckDBPyConnection, thumbnails: Thumbnails, largest: list[dict[str, Any]], each: int
) -> list[dict[str, Any]]:
    """Members of the clusters `largest` ({name, rows}): [{cluster, rows, pairs: [{caption, picture, kept, ...}]}]."""
    if not largest or "pairs" not in views(connection):
        return []
    names = [row["name"] for row in largest]
    members = connection.execute(
        f"""SELECT cluster, uid FROM decisions WHERE cluster IN (SELECT unnest(?))
        QUALIFY row_number() OVER (PARTITION BY cluster ORDER BY kept DESC, uid) <= {each}
        ORDER BY cluster, kept DESC, uid""",
        [names],
    ).fetchall()
    found = _details(connection, [uid for _, uid in members])
    out = []
    for row in largest:
        uids = [uid for cluster, uid in members if cluster == row["name"] and uid in found]
        pairs = [_shown(found[uid], thumbnails) for uid in uids]
        out.append({"cluster": row["name"], "rows": row["rows"], "pairs": pairs})
    return out


def failures(connection: duckdb.DuckDBPyConnection, each: int = 3) -> list[dict[str, Any]]:
    """Rows that were not fetched, {outcome, rows, examples: [{url, detail}]} by outcome."""
    if "pairs" not in views(connection):
        return []
    columns = {row[0] for row in connection.execute("DESCRIBE pairs").fetchall()}
    detail = "detail" if "detail" in columns else "NULL"
    return _records(
        connection,
        f"""SELECT outcome, count(*) AS rows,
        arg_min({{'url': left(url, 300), 'detail': left({detail}, 200)}}, hash(url), {each}) AS examples
        FROM pairs WHERE outcome <> 'ok' GROUP BY 1 ORDER BY rows DESC, outcome""",
    )


def _details(connection: duckdb.DuckDBPyConnection, uids: list[str]) -> dict[str, dict[str, Any]]:
    """Pair and decision of each uid."""
    if not uids:
        return {}
    decided = "LEFT JOIN decisions d USING (uid)" if "decisions" in views(connection) else f"CROSS JOIN ({UNDECIDED}) d"
    cursor = connection.execute(
        f"""SELECT uid, any_value(p.caption) AS caption, any_value(p.url) AS url, any_value(p.tar) AS tar,
        any_value(p.tar_offset) AS tar_offset, any_value(p.tar_size) AS tar_size, any_value(p.width) AS width,
        any_value(p.height) AS height, any_value(d.kept) AS kept, any_value(d.reason) AS reason,
        any_value(d.survivor) AS survivor, any_value(d.evidence) AS evidence, any_value(d.similarity) AS similarity
        FROM pairs p {decided}
        WHERE uid IN (SELECT unnest(?)) AND p.outcome = 'ok' GROUP BY uid""",
        [uids],
    )
    names = [column[0] for column in cursor.description or []]
    return {row[0]: dict(zip(names, row, strict=True)) for row in cursor.fetchall()}


def _shown(row: dict[str, Any], thumbnails: Thumbnails) -> dict[str, Any]:
    keys = ("uid", "url", "width", "height", "kept", "reason", "evidence", "similarity")
    caption = row["caption"] or ""
    if len(caption) > CAPTION_CHARS:
        caption = caption[:CAPTION_CHARS] + "…"
    return {**{key: row[key] for key in keys}, "caption": caption, "picture": thumbnails.of(row)}

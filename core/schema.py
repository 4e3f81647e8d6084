"""Rows that cross a stage boundary: the outcome of a fetch and the Arrow schemas of the Parquet parts.

pyarrow is imported inside the schema functions, because the CLI reads this module to build its help.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def sound(text: str) -> str:
    """`text` without the lone surrogates that JSON and names in a tar may smuggle in and UTF-8 cannot hold."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode()


class Outcome(StrEnum):
    """What became of one input row. Closed: a reader may rely on these words being all there are."""

    OK = "ok"
    BAD_URL = "bad_url"
    BLOCKED_ADDRESS = "blocked_address"
    DNS = "dns"
    CONNECT = "connect"
    TLS = "tls"
    TIMEOUT = "timeout"
    TOO_SLOW = "too_slow"
    TOO_LARGE = "too_large"
    HTTP_4XX = "http_4xx"
    HTTP_429 = "http_429"
    HTTP_5XX = "http_5xx"
    ROBOTS = "robots"
    OPTED_OUT = "opted_out"
    NOT_IMAGE = "not_image"
    UNSUPPORTED = "unsupported"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    BOMB = "bomb"
    TOO_SMALL = "too_small"
    BAD_ASPECT = "bad_aspect"
    EMPTY_CAPTION = "empty_caption"
    INTERNAL = "internal"


# Another attempt may end differently; everything else is a property of the URL, the file or our own rules.
RETRYABLE = frozenset(
    {
        Outcome.DNS,
        Outcome.CONNECT,
        Outcome.TLS,
        Outcome.TIMEOUT,
        Outcome.TOO_SLOW,
        Outcome.TRUNCATED,
        Outcome.HTTP_429,
        Outcome.HTTP_5XX,
        Outcome.INTERNAL,
    }
)


def pair_fields() -> list[pa.Field]:
    """The columns of `ingest/parts/*.parquet`, one row an input row, before the source's own columns.

    `bytes`, `sha256` and `format` describe the body as received; `width`, `height` the picture as displayed (after
    orientation, before resizing); `stored_*` and `tar_*` the image staged in the tar of the same name: its pixels, hash and
    checksum, and `tar_offset` is the byte position of the image data itself. `image_hash` is 32 bytes: 256 bits of a DCT
    hash.
    """
    import pyarrow as pa

    return [
        pa.field("uid", pa.string(), nullable=False),
        pa.field("unit", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("url", pa.string()),
        pa.field("caption", pa.string()),
        pa.field("caption_raw", pa.string()),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("detail", pa.string()),
        pa.field("status", pa.int32()),
        pa.field("final_url", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("elapsed_s", pa.float64()),
        pa.field("bytes", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("format", pa.string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("stored_width", pa.int32()),
        pa.field("stored_height", pa.int32()),
        pa.field("stored_sha256", pa.string()),
        pa.field("stored_crc32", pa.uint32()),
        pa.field("tar", pa.string()),
        pa.field("tar_offset", pa.int64()),
        pa.field("tar_size", pa.int64()),
        pa.field("image_hash", pa.binary(32)),
        pa.field("image_hash_mirrored", pa.binary(32)),
        pa.field("lang", pa.string()),
        pa.field("fetched_at", pa.timestamp("us", tz="UTC")),
    ]


def pair_schema(source_columns: list[pa.Field] | None = None) -> pa.Schema:
    """Schema of one ingest part: `pair_fields` and then the source's own columns, in the source's order."""
    import pyarrow as pa

    return pa.schema([*pair_fields(), *(source_columns or [])])


def decision_schema() -> pa.Schema:
    """Schema of the view `decisions`, one row a pair that was fetched, and of `dedup/decisions.parquet`, which leaves out
    the pairs of `dedup/pairs.parquet` that stay and are like no other.

    `reason` is null for a kept pair, else the rule that dropped it (`image_duplicate`, `caption_duplicate`,
    `pair_duplicate`, `caption_cap`, `holdout`, `where`, `balance`, `against:SET`, or the name of a preset's rule).
    `survivor` is the uid that stands for a dropped duplicate (null where a condition dropped it; a pair that is in an
    evaluation set has the evidence for that alone), `evidence` how that is known (`url`, `sha256`, `image_hash`,
    `caption`, `minhash`), `similarity` in [0, 1]. `image_group` is the smallest uid among the pairs whose pictures are the
    same; `holdout` marks the evaluation rows, which are always kept and never trained on.
    """
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("uid", pa.string(), nullable=False),
            pa.field("kept", pa.bool_(), nullable=False),
            pa.field("holdout", pa.bool_(), nullable=False),
            pa.field("reason", pa.string()),
            pa.field("cluster", pa.string()),
            pa.field("image_group", pa.string(), nullable=False),
            pa.field("survivor", pa.string()),
            pa.field("evidence", pa.string()),
            pa.field("similarity", pa.float32()),
        ]
    )


def sample_schema() -> pa.Schema:
    """Schema of `shards/samples.parquet`: one row a sample, in shard order.

    `captions` are all kept captions of the picture, `caption` the first of them (KEY.txt); `uids` are their pairs.
    `jpg_offset` and `jpg_size` locate the image bytes inside the shard, `crc32` checks them at read time; `sha256` is of
    the same bytes. `image_group` groups pictures that are the same, for the loss's mask.
    """
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("shard", pa.string(), nullable=False),
            pa.field("key", pa.string(), nullable=False),
            pa.field("uid", pa.string(), nullable=False),
            pa.field("uids", pa.list_(pa.string()), nullable=False),
            pa.field("caption", pa.string(), nullable=False),
            pa.field("captions", pa.list_(pa.string()), nullable=False),
            pa.field("url", pa.string()),
            pa.field("jpg_offset", pa.int64(), nullable=False),
            pa.field("jpg_size", pa.int64(), nullable=False),
            pa.field("width", pa.int32(), nullable=False),
            pa.field("height", pa.int32(), nullable=False),
            pa.field("crc32", pa.uint32(), nullable=False),
            pa.field("sha256", pa.string(), nullable=False),
            pa.field("image_group", pa.string(), nullable=False),
        ]
    )

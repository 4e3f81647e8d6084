"""Settings of `ingest` and `adopt`."""

from __future__ import annotations

from dataclasses import dataclass

from core.config import UnitsConfig, setting
from core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class IngestConfig(UnitsConfig):
    """Download the pictures of a URL list and stage them with their captions."""

    engine: str = setting("local", stable=False)
    """Where units run: `local` processes, `ray` (needs the extra of that name), or `img2dataset`: that package downloads
    and its shards are adopted (needs the extra of that name)."""
    urls: str = setting(argument=True, stable=False)
    """The list: a parquet, csv, tsv, json, jsonl or txt file, also .gz or .zst, a glob, or an fsspec URL (s3://...)."""
    url_col: str = setting("url", also=("--url_col",))
    """Column with the image URL; a number counts columns from 0 in a list without a header."""
    caption_col: str = setting("caption", also=("--caption_col",))
    """Column with the alt text; a number counts columns from 0 in a list without a header. A txt list has none; an empty
    name stands for a list of another form that has none either."""
    allow_empty: bool = False
    """Download pictures whose caption is empty too; they are of use where captions come later. Always so for txt."""
    size: int = setting(256, also=("--image_size",))
    """Shorter side of the stored image, in pixels; the aspect ratio stays. Slightly above the training resolution leaves
    room for random crops. Smaller pictures are never enlarged."""
    quality: int = setting(90, also=("--encode_quality",))
    """JPEG quality of the stored image, 1 to 100. 95 is half as large again, for pictures that are compressed again."""
    keep_original: bool = False
    """Store each file as it came, checked but not re-encoded; five to fifty times the space."""
    min_side: int = setting(32, also=("--min_image_size",))
    """Refuse pictures whose shorter side is below this many pixels (icons, tracking pixels); 0 takes all."""
    concurrency: int = setting(64, stable=False, also=("--thread_count",))
    """Downloads at once in one worker process. More helps when hosts are slow, until memory or bandwidth is full."""
    per_host: int = setting(8, stable=False)
    """Downloads at once from one host, over all workers of this machine (each gets its share, one at least), and in a second
    not more than 12.5 times as many. Politeness: raise it only for hosts that are your own."""
    robots: bool = setting(False, flags="--robots/--no-robots", stable=False)
    """Read each site's robots.txt (once a worker and span) and obey it; costs one more request a site."""
    timeout: float = setting(20.0, stable=False)
    """Seconds from the first byte sent to the last byte received, redirects included, for one attempt."""
    retries: int = setting(2, stable=False)
    """Further attempts after a failure that may pass: refused or reset connections, 429, 5xx, bodies cut short."""
    contact: str = setting("", stable=False)
    """A web page or mail address for the user agent, so that site owners can reach you. Honest agents are blocked less."""
    allow_private: bool = setting(False, stable=False)
    """Also connect to private and loopback addresses, and visit hosts as often as they answer. Only for lists that you wrote
    yourself."""
    retry_failed: bool = setting(False, stable=False)
    """Try the failures of an ingest again that another attempt may cure; good rows are left alone. It goes on where a run was
    stopped because fewer than 1 % of its rows succeeded."""
    unit_urls: int = setting(1000, also=("--number_sample_per_shard",))
    """Distinct URLs a unit. A unit is one tar and one Parquet part; a killed run goes on in the middle of one."""


@dataclass(frozen=True, kw_only=True)
class AdoptConfig(UnitsConfig):
    """Take shards of webdataset or img2dataset in as pairs, without copying a byte of their images."""

    shards: str = setting(argument=True)
    """Folder of .tar files (a path or an fsspec URL), or a glob of them."""
    allow_empty: bool = False
    """Take pictures whose caption is empty too."""
    min_side: int = 32
    """Refuse pictures whose shorter side is below this many pixels; 0 takes all."""


_BOUNDS = {
    "size": (1, 65_535), "quality": (1, 100), "min_side": (0, 65_535), "concurrency": (1, 10_000),
    "per_host": (1, 10_000), "timeout": (0.001, 86_400), "retries": (0, 100), "unit_urls": (1, 10**9),
}  # fmt: skip


def check(config: IngestConfig | AdoptConfig) -> None:
    """Raise ConfigError for a number that can have no meaning; 0 downloads at once would wait for ever."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(config, name, low)
        if not low <= value <= high:
            flag = name.replace("_", "-")
            raise ConfigError(f"expected --{flag} from {low:,} to {high:,}, found {value}")

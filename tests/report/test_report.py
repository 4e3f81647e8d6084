from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from core.errors import InputError
from report import charts, html, run
from report.config import ReportConfig
from report.markup import tag
from tests.report.folder import HOSTILE, caption, make_work, step_row

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """What a browser would see: text outside scripts, scripts, pictures, sections."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text, self.scripts, self.pictures, self.links = [], [], [], []
        self.sections: set[str] = set()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._in = ""
        self.feed(source)

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((name, values))
        self._in = name
        if name == "img":
            self.pictures.append(values["src"])
        if name == "section":
            self.sections.add(str(values["id"]))
        self.links += [str(values[key]) for key in ("href", "src") if values.get(key)]

    def handle_data(self, data: str) -> None:
        (self.scripts if self._in == "script" else self.text).append(data)

    def handle_endtag(self, name: str) -> None:
        self._in = ""


@pytest.fixture(scope="module")
def source(work: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    summary = run.run(ReportConfig(work=str(work), out=str(out)))
    assert summary["bytes"] == out.stat().st_size < html.MAX_BYTES
    return out.read_text()


def test_every_section_is_there(source: str) -> None:
    assert Page(source).sections == {"dropped", "duplicates", "data", "training", "evaluation", "settings"}


def test_pictures_come_from_the_staged_tars(source: str) -> None:
    pictures = Page(source).pictures
    # 6 copies with their survivors, 4 of the rule, 20 - 8 members of six clusters, 5 + 2 x 5 examples
    assert len(pictures) >= 12 + 4 + 12 + 15
    assert all(p.startswith("data:image/jpeg;base64,/9j/") for p in pictures)


def test_a_hostile_caption_stays_text(source: str) -> None:
    page = Page(source)
    assert HOSTILE in "".join(page.text)
    assert len(page.scripts) == 1 and "owned" not in page.scripts[0]
    assert not [values for _, values in page.tags if any(key.startswith("on") for key in values)]


def test_nothing_is_loaded_from_anywhere(source: str) -> None:
    assert all(link.startswith(("data:image/", "#")) for link in Page(source).links)
    assert "url(" not in source and "@import" not in source
    assert "default-src &#x27;none&#x27;" in source


def test_the_recipe_gives_the_same_settings_back(source: str) -> None:
    recipe = re.search(r"<pre[^>]*>(.*?)</pre>", source, re.DOTALL)
    assert recipe
    stages = tomllib.loads(unescape(recipe.group(1)))
    assert stages["work"].endswith("/work")
    assert stages["ingest"] == {"urls": "list.tsv", "size": 96}
    assert stages["dedup"] == {"captions": "", "where": "width < 1000"}  # also what may be decided again
    assert stages["train"] == {"model": "test-32", "batch_size": 8, "lr": 5e-4}


@pytest.mark.parametrize(("upto", "sections"), [("ingest", {"dropped", "data", "settings"}),
                                                ("dedup", {"dropped", "duplicates", "data", "settings"})])  # fmt: skip
def test_a_folder_that_is_not_finished(tmp_path: Path, upto: str, sections: set[str]) -> None:
    work = make_work(tmp_path / "work", upto=upto)
    run.run(ReportConfig(work=str(work)))
    assert Page((work / "report.html").read_text()).sections == sections


def test_a_tar_that_went_away_costs_only_its_pictures(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work", upto="dedup")
    (work / "ingest/parts/u000001.tar").unlink()
    run.run(ReportConfig(work=str(work)))
    page = Page((work / "report.html").read_text())
    assert page.pictures and "no picture" in page.text


def test_a_run_that_is_still_writing(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work", upto="shard")
    home = work / "runs" / "live"
    home.mkdir(parents=True)
    (home / "metrics.jsonl").write_text(str(step_row(10)).replace("'", '"').replace("None", "null") + '\n{"step": 2')
    summary = run.run(ReportConfig(work=str(work)))
    assert summary["run"] == "live"
    assert "not logged two rows yet" in (work / "report.html").read_text()


def test_the_latest_run_is_shown_unless_one_is_named(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work")
    shutil.copytree(work / "runs/first", work / "runs/second")
    with (work / "runs/second/metrics.jsonl").open("a") as file:
        file.write(str(step_row(500)).replace("'", '"').replace("None", "null") + "\n")
    assert run.run(ReportConfig(work=str(work)))["run"] == "second"
    assert run.run(ReportConfig(work=str(work), name="first"))["run"] == "first"
    with pytest.raises(InputError, match="'first'"):
        run.run(ReportConfig(work=str(work), name="frist"))


def test_what_the_gpus_did_is_drawn_as_shares(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work")
    assert "The GPUs" not in run_page(work)
    over = {"busy": 0.5, "power_w": 350.0, "power_limit_w": 700.0, "memory_bytes": 30e9}
    gpu = {name: {"mean": value, "min": value, "max": value} for name, value in over.items()}
    rows = [{**step_row(10), "gpu": None}, {**step_row(20), "gpu": gpu}, {**step_row(30), "gpu": gpu}]
    (work / "runs/first/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = run_page(work)
    assert "The GPUs" in page and "step 20: busy 50 %; power 50 %<" in page  # memory has no limit to be a share of


def run_page(work: Path) -> str:
    run.run(ReportConfig(work=str(work)))
    return (work / "report.html").read_text()


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pairmill ingest"):
        run.run(ReportConfig(work=str(tmp_path)))


def test_the_story_tells_the_numbers(source: str) -> None:
    text = "".join(Page(source).text)
    assert "Of 72 rows, 46 pairs were kept: 12 could not be fetched and 14 were dropped as copies or by rules." in text
    assert "50 % of pictures right among 20 classes" in text


def test_markup_escapes_whatever_is_not_markup() -> None:
    assert tag("p", "<b>", tag("i", '"&"'), title='"<') == '<p title="&quot;&lt;">&lt;b&gt;<i>&quot;&amp;&quot;</i></p>'
    assert tag("li", None, [1, "x"], hidden=True, class_=None) == "<li hidden>1x</li>"


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (12300, "12,300"), (0.0123, "0.0123"), (2.5, "2.5"), (1234.5678, "1,235"), (5e-4, "0.0005")],
)
def test_numbers(value: float, words: str) -> None:
    assert charts.number(value) == words


def test_a_flat_curve_and_gaps_have_an_axis() -> None:
    figure = charts.lines("Flat", [1, 2, 3], [("a", "a", [0.5, None, 0.5])])
    assert figure.count("<path") == 1 and "nan" not in figure


def test_long_runs_stay_small(tmp_path: Path) -> None:
    work = make_work(tmp_path / "work")
    line = str(step_row(10)).replace("'", '"').replace("None", "null")
    lines = [line.replace('"step": 10', f'"step": {i}') for i in range(1, 20_001)]
    (work / "runs/first/metrics.jsonl").write_text("\n".join(lines))
    summary = run.run(ReportConfig(work=str(work)))
    assert summary["bytes"] < 1_000_000
    assert "20,000" in (work / "report.html").read_text()


def dump(source: str, folder: Path, *more: str) -> str:
    """The page's document after its scripts have run in a real browser, which had nothing to complain about."""
    (folder / "page.html").write_text(source)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}/profile",
             "--enable-logging=stderr"]  # fmt: skip
    command = [str(CHROMIUM), *flags, *more, "--dump-dom", f"file://{folder}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr
    return done.stdout


def scripted(source: str, script: str) -> str:
    """The page with a script of the test's, which its policy would not let run."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source)
    return page.replace("</body>", f"<script>{script}</script></body>")


def title_of(document: str) -> str:
    found = re.search("<title>(.*?)</title>", document)
    assert found
    return unescape(found.group(1))


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_runs_our_script_and_no_other(source: str, tmp_path: Path) -> None:
    document = dump(source, tmp_path)
    assert "<title>work · pairmill report</title>" in document
    # our script has moved the words of the marks from <title> to data-tip, so it ran under the content policy
    assert '<g class="mark"><title>' not in document and 'data-tip="step 10: loss' in document


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_arrow_keys_read_values_and_chips_filter(source: str, tmp_path: Path) -> None:
    script = """
      const press = (figure, key) => figure.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const loss = [...document.querySelectorAll("figure[tabindex]")].find((f) => f.textContent.startsWith("Loss"));
      press(loss, "End"); press(loss, "ArrowLeft");
      const words = document.getElementById("tip").textContent;
      document.querySelector('.chips [data-reason="align:aspect"]').click();
      const shown = [...document.querySelectorAll(".gallery .group")].filter((g) => !g.hidden).map((g) => g.dataset.reason);
      document.title = words + " | " + shown;
    """
    assert title_of(dump(scripted(source, script), tmp_path)) == "step 190: loss 0.892 | align:aspect"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_dark_and_as_narrow_as_a_phone(source: str, tmp_path: Path) -> None:
    """No window of Chromium is narrower than 500 px; at a zoom of 1.4 that is a phone of 357. Nothing may be wider than it,
    charts have their height, and the colours are the dark ones."""
    script = """
      document.documentElement.style.zoom = 1.4;
      scrollTo({left: 50, behavior: "instant"});
      const flat = [...document.querySelectorAll("figure svg")].filter((e) => e.getBoundingClientRect().height < 50);
      document.title = [scrollX, innerWidth, flat.length, getComputedStyle(document.body).backgroundColor].join(" | ");
    """
    flags = ("--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    document = dump(scripted(source, script), tmp_path, *flags)
    assert title_of(document) == "0 | 500 | 0 | rgb(20, 21, 24)"


def test_captions_of_the_fixture_are_told_apart() -> None:
    assert caption(7) == HOSTILE and len({caption(i) for i in range(1, 10)}) == 9

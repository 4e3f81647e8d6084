"""Laws recovered from points that were put on them."""

from __future__ import annotations

import csv
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from core.errors import InputError
from train import budget, scaling
from train.config import PlanConfig
from train.scaling import Law, Run, fit, frontier

# Cherti et al. 2023, zero-shot ImageNet error: exponent, error of a tenfold and of a hundredfold compute.
PUBLISHED = {"LAION": (0.11, 0.78, 0.60), "WIT": (0.16, 0.69, 0.48)}


def runs_of(data: str, k: float) -> list[Run]:
    """Runs on the law E = 2.5 C^-k, each with two wasteful ones beside it."""
    law = Law(k, 2.5)
    good = [Run(f"best {i}", data, c, law.error(c)) for i, c in enumerate((1e9, 1e10, 1e11, 1e12))]
    wasteful = [Run("wasteful", data, 2 * r.compute, r.error * worse) for r in good for worse in (1.01, 1.3)]
    return wasteful + good


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "data", "compute", "error"])
        for data, (k, _, _) in PUBLISHED.items():
            writer.writerows([r.name, r.data, r.compute, r.error] for r in runs_of(data, k))
    return path


@pytest.mark.parametrize("data", PUBLISHED)
def test_published_exponents_give_the_published_factors(data: str) -> None:
    k, tenfold, hundredfold = PUBLISHED[data]
    law = fit(frontier(runs_of(data, k)))
    assert (law.k, law.a) == (pytest.approx(k), pytest.approx(2.5))
    assert law.error(1e13) / law.error(1e12) == pytest.approx(tenfold, abs=0.005)
    assert law.error(1e14) / law.error(1e12) == pytest.approx(hundredfold, abs=0.005)


def test_the_frontier_is_what_no_cheaper_run_beats() -> None:
    runs = [Run(*one) for one in (("a", "", 1.0, 0.5), ("b", "", 2.0, 0.6), ("c", "", 3.0, 0.4), ("d", "", 3.0, 0.45),
                                  ("e", "", 4.0, 0.4))]  # fmt: skip
    assert [r.name for r in frontier(runs)] == ["a", "c"]


def test_all_runs_would_give_another_law() -> None:
    runs = runs_of("LAION", 0.11)
    assert fit(runs).a > 1.02 * fit(frontier(runs)).a


def test_each_data_set_has_its_law_and_the_plot_shows_them(table: Path) -> None:
    found = budget.run(PlanConfig(what="scaling", table=str(table)))
    assert {law["data"]: round(law["k"], 3) for law in found["scaling"]} == {"LAION": 0.11, "WIT": 0.16}
    assert found["scaling"][0]["next"]["10"] == pytest.approx(2.5 * 2e13**-0.11)
    picture = ET.parse(found["plot"]).getroot()
    names = [one.tag.rpartition("}")[2] for one in picture.iter()]
    assert (names.count("circle"), names.count("polyline")) == (24, 2)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(budget.render(found))
    assert "C^-0.110" in capture.get() and "runs.svg" in capture.get()


def test_accuracies_and_hostile_names_will_do(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("compute,accuracy,name\n1,0.5,<script>\n10,0.75,b\n")
    (law,) = scaling.run(str(path))["scaling"]
    assert law["k"] == pytest.approx(math.log10(2))
    assert "<script>" not in path.with_suffix(".svg").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("compute,error\n", "found none"),
        ("flops,loss\n1,0.5\n", "row 2: expected the columns"),
        ("compute,error\n1,0.5\n-3,0.4\n", "row 3: expected compute above 0"),
        ("compute,error\n1,0.5\n1,0.4\n", "two runs"),
        ("compute,error\n1,nan\n", "row 2"),
    ],
)
def test_a_table_that_holds_no_runs(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        scaling.run(str(path))
    with pytest.raises(InputError, match="expected a CSV file"):
        scaling.run(str(tmp_path / "none.csv"))

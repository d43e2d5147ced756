"""What benchmarks/laws.py makes of its figures."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def laws():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module("laws")


@pytest.fixture(scope="module")
def cost_law(laws):
    return importlib.import_module("cost_law")  # loaded with it


@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        ({}, 42),
        ({"k": 0, "chains": 5}, 2),  # without steps all chains are one
        ({"chains": 5, "draws": 2}, 420),
        ({"side": 56, "batch": 7}, 168),
        ({"budget": "least"}, 60),  # one of ten steps' graphs is kept
    ],
)
def test_the_law_of_time(laws, changes, forwards):
    assert laws.Point(**changes).law == pytest.approx(forwards)


@pytest.mark.parametrize("budget", ["usual", "least"])
def test_the_model_counts_the_work_of_the_law(laws, budget):
    point = laws.Point(k=3, draws=2, batch=2, budget=budget)
    assert laws.Case.of(point).work() == point.law


def test_the_line_weighs_relative_errors(cost_law):
    assert cost_law.straight_line([1, 2, 8], [5, 7, 19]) == pytest.approx((3, 2))
    intercept, slope = cost_law.straight_line([1, 2, 1000], [5, 7, 3000])
    assert intercept + slope == pytest.approx(5, rel=0.2)


@pytest.mark.parametrize(
    ("cost", "law", "straight", "recomputed", "off", "why"),
    [
        (109, 100, 50, False, 0.09, None),
        (150, 100, 145, False, 0.5, "fixed"),
        (150, 100, 120, False, 0.5, "other"),
        (105, 100, 90, True, 1 / 6, "budget"),
        (120, 100, 120, True, 0, None),
    ],
)
def test_what_is_off_has_a_cause(cost_law, cost, law, straight, recomputed, off, why):
    assert cost_law.departure(cost, law, straight, recomputed) == (pytest.approx(off), why)


def test_batches_are_judged_by_the_call_and_the_newest_record_counts(laws, cost_law, tmp_path):
    # A call takes 100 F and 40 F an image, but the largest batch recomputes.
    rows = [
        {"part": "batch", "value": n, "budget": "usual", "law F": 42, "work F": 42 if n < 256 else 48,
         "F": 100 / n + (40 if n < 256 else 46), "law MB": n, "MB": 1.05 * n}
        for n in (2, 8, 32, 128, 256)
    ]  # fmt: skip
    intercept, slope = cost_law.line("batch", rows, "F")
    assert (intercept, slope) == pytest.approx((100, 40))
    judged = cost_law.judged("batch", rows)
    assert [r["F why"] for r in judged] == ["fixed", "fixed", None, None, "budget"]
    assert [r["MB why"] for r in judged] == [None] * 5
    text = '{"rows": [{"part": "k", "value": %d}]}\n'
    (tmp_path / "laws.jsonl").write_text(text % 1 + text % 2)
    assert laws.newest(tmp_path / "laws.jsonl") == {"k": [{"part": "k", "value": 2}]}

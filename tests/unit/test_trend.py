"""docs/benchmarks.md and the figures that it is made of."""

import json
import sys
import time
from pathlib import Path

from tests.benchmarks.__main__ import NAMES
from tests.benchmarks.support.report import SKIPPED
from tests.benchmarks.trend.__main__ import run_all
from tests.benchmarks.trend.classes import class_of, measured
from tests.benchmarks.trend.forms import FORMS, ShortForm, Shown
from tests.benchmarks.trend.page import PAGE, page

MACHINE = {"cpu": "a processor", "cores": 2, "features": ["avx2", "avx512f", "avx512_bf16"]}


def test_the_page_is_what_the_figures_make():
    """Otherwise: make bench-all ARGS=--page."""
    assert PAGE.read_text() == page()


def test_the_page_stays_short_when_every_figure_is_measured(tmp_path: Path):
    (tmp_path / "benchmarks.template").write_text(Path("docs/figures/benchmarks.template").read_text())
    run = {"date": "2026-01-01", "cpu": "a processor", "arguments": ""}
    full = {form.section: run | {"figures": {f.label: [1.0] for f in form.figures}} for form in FORMS}
    (tmp_path / "avx2-2.json").write_text(json.dumps(full))
    assert len(page(tmp_path).splitlines()) <= 400


def test_every_benchmark_has_a_short_form():
    assert {form.benchmark for form in FORMS} == {*NAMES}
    assert len({form.section for form in FORMS}) == len(FORMS)


def test_a_report_becomes_medians_and_spread():
    repeats = {"ours": [{"rate": 6.0}, {"rate": 9.0}], "other": [{"rate": 3.0}, {"rate": 3.0}]}
    report = {"ratio": 2.4, "rows": [{"model": "m4", "rows": 1, "ms": 7}], "repeats": repeats}
    ours, other = "repeats > ours > * > rate", "repeats > other > * > rate"
    assert measured(Shown("", "ratio", ours, other), report) == [2.4, 2, 3]
    assert measured(Shown("", "", ours), report) == [7.5, 6, 9]
    assert measured(Shown("", "rows > model=m4; rows=1 > ms"), report) == [7]
    assert class_of(MACHINE) == "avx512-bf16-2"


def test_what_fails_or_takes_too_long_is_named_and_the_others_run(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text("import runpy, sys\nrunpy.run_path(f'{sys.argv[1]}.py')")
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "unfit.py").write_text(f"raise SystemExit({SKIPPED})")
    report = {"date": "2026-01-01T00:00:00Z", "machine": MACHINE, "settings": {"arguments": []}, "a": 1, "b": 2}
    (tmp_path / "works.py").write_text(f"open('build/bench/works.json', 'w').write('''{json.dumps(report)}''')")
    monkeypatch.setattr("tests.benchmarks.trend.classes.FORMS", forms := (
        ShortForm("one", "fails", "", "", ()),
        ShortForm("two", "hangs", "", "", (), seconds=0.2),
        ShortForm("not on this processor", "unfit", "", "", ()),
        ShortForm("three", "empty", "", "", ()),
        ShortForm("four", "works", "", "", [Shown("a", "a"), Shown("not on this processor", "c")]),
    ))  # fmt: skip
    run = (sys.executable, "run.py")
    reasons = list(run_all(forms, time.monotonic() + 60, run=run, figures=tmp_path))
    assert [reason.partition(";")[0] for reason in reasons[:2]] == ["one: exit status 3", "two: exceeded its limit"]
    assert reasons[2].startswith("three: ")
    assert len(reasons) == 3
    assert json.loads((tmp_path / "avx512-bf16-2.json").read_text())["four"]["figures"] == {"a": [1]}
    assert list(run_all(forms[4:], time.monotonic() - 1, run=run)) == ["four: no time left"]

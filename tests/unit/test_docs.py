"""Existence of everything that the documentation names: links, files, tests, rules, flags and benchmarks."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from services import config
from tests.simulation.test_acceptance import ROOMY
from tests.simulation.world import World

ROOT = Path(__file__).parents[2]
INSTALLED = "node_modules"
"""Packages of `make test-clients` are below this folder."""
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "deploy/*/README.md", "tests/**/README.md")
    for path in ROOT.glob(pattern)
    if INSTALLED not in path.parts
)
RULES = ROOT / "docs" / "invariants.md"
SOURCES = [
    path
    for folder in ("protocol", "services", "deploy", "tests", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".yml", ".yaml", ".toml")
    and path != Path(__file__)
    and INSTALLED not in path.parts
]

OTHER_PROGRAMS = {
    "--scale", "--from-file", "--index-url", "--no-index", "--no-deps", "--target", "--out", "--wheel-dir",
    "--find-links", "--constraint", "--require-hashes", "--requirement", "--upgrade", "--worker-urls",
    "--head", "--num-cpus", "--node-ip-address", "--nodes", "--ntasks-per-node", "--cpus-per-task",
    "--signal", "--batch",
}  # fmt: skip
"""Flags of docker, kubectl, pip, ray, Slurm and the measurements."""
LONGEST_LINE = 120

PATH = re.compile(r"`((?:docs|services|protocol|deploy|tests)/[\w./-]+)(?:::(\w+)(?:\[([^\]`]+)\])?)?`")
NUMBERED = re.compile(
    r"\b(?:[Ss]pec(?:ification)? [0-9]|S[0-4]-[0-9]|I-[a-d]\b|[0-9]\([a-e][0-9]?\) [0-9]|[Rr]ules? [0-9]"
    r"|[Ii]nvariants? [0-9]|DESIGN(?:\.md)? [0-9]|[Ii]ssues? #?[0-9]|[Aa]cceptance tests? [0-9])"
    r"|\([a-e]\) [0-9]+[,:;.)]"
)
"""Citations of a rule by its number instead of its name in docs/invariants.md."""
RULE = re.compile(r"\b([\w -]+)\s+\((?:see\s+)?`?docs/invariants\.md(?:#([\w-]+))?`?\)")


def anchors(page: Path) -> set[str]:
    """Anchors that the page's headings get on GitHub."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def rules() -> dict[str, str]:
    """Text of each rule by its name."""
    parts = re.split(r"^### (.+)$", RULES.read_text().split("\n## Numbers\n")[1], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize(
    ("page", "headings"), [(RULES, "##+"), (RULES.with_name("benchmarks.md"), "##")], ids=["rules", "benchmarks"]
)
def test_a_long_page_begins_with_all_of_its_sections(page: Path, headings: str) -> None:
    own, other = page.read_text().split("\n## On this page\n")[1].split("\n## ", 1)
    sections = re.findall(rf"^{headings} (.+)$", f"## {other}", re.MULTILINE)
    assert sorted(re.findall(r"\[([^\]]+)\]\(#", own)) == sorted(sections)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    for name, test, case in PATH.findall(page.read_text()):
        path = ROOT / name
        assert path.exists(), name
        if test:
            defined = rf"^(?:async )?def {test}\(|^class {test}\b|^{test} = "
            assert re.search(defined, path.read_text(), re.MULTILINE), f"{name}::{test}"
        if case:
            assert re.search(rf"\b{case}\b", path.read_text()), f"{name}::{test}[{case}]"


@pytest.mark.parametrize("rule", rules())
def test_every_rule_names_its_test(rule: str) -> None:
    text, found, tests = rules()[rule].partition("\n\nTest:")
    assert text.strip()
    assert found
    assert re.match(r"\s`tests/[\w/]+\.py::[Tt]est\w+", tests)


def test_rules_that_are_cited_exist() -> None:
    names = {re.sub(r"\W", " ", name.lower()) for name in rules()} | {"rule", "rules", "invariants"}
    for path in SOURCES:
        text = path.read_text()
        for before, anchor in RULE.findall(text) if RULES.name in text else ():
            cited = re.sub(r"\s+", " ", before.lower().replace("-", " "))
            assert any(cited.endswith(name) for name in names), f"{path}: {before} (docs/invariants.md)"
            assert not anchor or anchor in anchors(RULES), f"{path}: {anchor}"


def test_no_rule_is_cited_by_number() -> None:
    cited = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*SOURCES, *PAGES]
        for match in NUMBERED.finditer(path.read_text())
    }
    assert cited == set()


@pytest.mark.parametrize(
    "citation", ["spec 0.7", "Spec 2.1", "(S2-3)", "I-a", "2(b) 3", "3(b) 10", "rule 9", "rules 7 and 8", "invariant 3"]
)
def test_citations_by_number_are_found(citation: str) -> None:
    assert NUMBERED.search(f"freed behind the fence, {citation}, and not before")


@cache
def known_flags() -> frozenset[str]:
    known = {config.flag(name) for name in config.EVERY_SETTING}
    known |= {f"--no-{flag.removeprefix('--')}" for flag in known} | {"--config", "--help", "--version"}
    for folder in ("tests/benchmarks", "tests/simulation", "services/cli", "deploy"):
        for path in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r"[\"'](--[a-z][a-z-]+)", path.read_text()))
            ints = " ".join(re.findall(r"add_ints\(parser, (.*)\)", path.read_text()))
            known |= {f"--{name.replace('_', '-')}" for name in re.findall(r"(\w+)=", ints)}
    return frozenset(known | OTHER_PROGRAMS)


FORMS = [path for path in sorted((ROOT / ".github").rglob("*")) if path.suffix in (".md", ".yml")]


@pytest.mark.parametrize("page", [*PAGES, *FORMS], ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    if page.name.startswith("for-"):  # the first column has the flags of another program
        text = re.sub(r"^\|[^|]*\|", "", text, flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known_flags()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_benchmarks_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"make bench NAME=(\w+)", page.read_text()):
        assert (ROOT / "tests" / "benchmarks" / f"{name}.py").exists(), name


EXAMPLES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ("clients.md", "examples.md")]
"""Pages with examples that need no server; tests/clients and tests/e2e run those of the others (test_examples.py)."""


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_python_examples_run(page: Path) -> None:
    """`core` in an example is an `EngineCore`."""
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(code, str(page), "exec"), {"core": World(ROOMY, 2).engine})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_not_too_long(page: Path) -> None:
    """A table, code, and a line that is a single word, such as the name of a test, cannot be broken."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = (line for line in prose.splitlines() if not line.startswith(("|", "    ")))
    assert [line for line in lines if len(line) > LONGEST_LINE and " " in line.strip()] == []


def test_no_text_installs_another_project() -> None:
    """The name `runahead` on PyPI belongs to another project."""
    pattern = re.compile(r"pip install [^\n]*\brunahead\b(?!-engine)")
    assert [str(path) for path in SOURCES + PAGES if pattern.search(path.read_text())] == []


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    words = "Of|What|Where|Who|Whoever|Whether|That|Those|How|Kept|Asked|Told"
    found = re.compile(rf'"""(?:{words})\b.*')
    assert {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in SOURCES
        if path.suffix == ".py"
        for match in found.finditer(path.read_text())
    } == set()


def test_a_class_name_stands_once() -> None:
    found = [
        name
        for path in SOURCES
        if path.suffix == ".py"
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    ]
    assert [name for name, count in Counter(found).items() if count > 1] == []


def test_every_page_has_a_place_on_the_site_and_on_the_map() -> None:
    listed = re.findall(r"^[a-z-]+$", (ROOT / "docs" / "site" / "pages" / "index.md").read_text(), re.MULTILINE)
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= set(listed)
    map_page = (ROOT / "docs" / "architecture.md").read_text()
    assert [page for page in pages - {"architecture"} if f"({page}.md" not in map_page] == []

"""The documents name files that exist, lead to headings that exist, and repeat the code as it is now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swarm import SOURCE
from swarm.extras import INSTALLS, LIBRARIES, installs
from tests.pages import PART, PARTS, page

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
LINKED = [*DOCUMENTS, *sorted(ROOT.glob("docs/decisions/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
OF_AN_EXAMPLE = {"play.py", "backwards.py", "higher.py", "judge.py", "FILE.py"}
MAX_LINES = 350


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_document_names_source_files_that_exist(document: Path) -> None:
    places = [
        path.relative_to(ROOT)
        for part in ("swarm", "tests", "benchmarks", "examples")
        for path in (ROOT / part).rglob("*.py")
    ]
    # A file may be named by its path in the tree, by its path in a package, or by its name alone.
    known = {"/".join(place.parts[start:]) for place in places for start in range(len(place.parts))}
    named = set(re.findall(r"[\w/]*\w\.py\b", document.read_text()))
    assert named - known - OF_AN_EXAMPLE == set()


def test_where_it_comes_from_is_said_as_its_owner_filled_it_in() -> None:
    assert f"git clone {SOURCE} echo-node" in (ROOT / "README.md").read_text()
    told = (ROOT / "docs/volunteer.md").read_text()
    for kind, line in installs().items():
        assert re.search(rf"    {re.escape(line)} +# {kind}\n", told)
    assert set(INSTALLS.values()) <= LIBRARIES.keys()


def anchors(document: Path) -> set[str]:
    """The headings, as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", LINKED, ids=name_of)
def test_a_link_leads_somewhere(document: Path) -> None:
    for target, _, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(#([^)\s]*))?\)", document.read_text()):
        there = (document.parent / target).resolve() if target else document
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("document", LINKED, ids=name_of)
def test_a_document_stays_short(document: Path) -> None:
    assert document.read_text().count("\n") <= MAX_LINES


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_document_repeats_the_code_as_it_is(document: Path) -> None:
    text = document.read_text()
    assert text == page(text), "out of date: bin/python -m tests.pages writes it"


def test_each_part_of_the_code_is_in_a_document() -> None:
    found = [name for document in DOCUMENTS for _, name, _ in PART.findall(document.read_text())]
    assert sorted(found) == sorted(PARTS)


def test_each_figure_of_a_step_is_explained() -> None:
    told = (ROOT / "docs/metrics.md").read_text()
    code = "".join(
        path.read_text()
        for room in ("learner", "lead", "rollout/plane", "audit")
        for path in (ROOT / "swarm" / room).glob("*.py")
    )
    named = set(re.findall(r'"([a-z_]+(?:/[a-z_]+)+)"', code))
    assert "staleness/mean" in named
    assert {name for name in named if f"`{name}`" not in told} == set()

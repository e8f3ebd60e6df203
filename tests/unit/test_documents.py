"""The documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
OF_AN_EXAMPLE = {"backwards.py", "higher.py"}  # In docs/tasks.md and docs/environments.md


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
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

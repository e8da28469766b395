"""Names of classes are unique, so that a name identifies one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "proxy"


def duplicates(files: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names that several classes have, with the files of these classes."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, text in files:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_two_classes_have_the_same_name() -> None:
    written = [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "api" not in path.parents]
    assert len(written) > 400
    assert duplicates((str(path.relative_to(PACKAGE)), path.read_text()) for path in written) == {}


def test_a_duplicate_name_is_reported() -> None:
    one, two = "class Row: ...\nclass Once: ...\n", "def f():\n    class Row: ...\n"
    assert duplicates([("a.py", one), ("b.py", two)]) == {"Row": ["a.py", "b.py"]}

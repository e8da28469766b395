"""Counts the code: lines without blanks, comments and docstrings, modules, and imports in functions.

.venv/bin/python bench/count.py                 proxy/ of this checkout, by package
.venv/bin/python bench/count.py b3705ac         compared with a commit
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from table import render

ROOT = Path(__file__).resolve().parent.parent
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Count the lines with code; a text that stands alone is a docstring."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def inner_imports(source: str) -> int:
    """Count the imports of our own modules in functions."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, _FUNCTIONS):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "proxy":
                    found.add(id(node))
    return len(found)


def sources(commit: str) -> Iterator[tuple[str, str]]:
    """Return path and text of each module of ``proxy/``, of a commit or (empty) of this checkout."""
    if not commit:
        for path in (ROOT / "proxy").rglob("*.py"):
            yield str(path.relative_to(ROOT)), path.read_text()
        return
    archive = subprocess.run(
        ["git", "archive", commit, "proxy"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None and member.name.endswith(".py"):
                yield member.name, file.read().decode()


def counts(commit: str) -> dict[str, Counter[str]]:
    """Count by package; generated code is left out."""
    found: dict[str, Counter[str]] = {}
    for name, source in sources(commit):
        if "/pb/" in name or name.startswith("proxy/api/"):
            continue
        parts = name.split("/")
        package = parts[1] if len(parts) > 2 else "(top)"
        more = Counter(lines=code_lines(source), modules=1, imports=inner_imports(source))
        found[package] = found.get(package, Counter()) + more
    return found


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description="Count code, modules, and imports in functions.")
    options.add_argument("commit", nargs="?", default="", help="count this one, too")
    commit = options.parse_args().commit
    counted = [counts(each) for each in ([commit] if commit else [])] + [counts("")]
    head = ["package"]
    for each in ([commit] if commit else []) + ["here"]:
        head += [f"lines, {each}", "modules", "imports in functions"]
    rows: list[list[str]] = []
    for package in sorted(set().union(*counted)):
        row = [package]
        for one in counted:
            row += [str(one.get(package, Counter())[key]) for key in ("lines", "modules", "imports")]
        rows.append(row)
    total = ["all"]
    for one in counted:
        total += [str(sum(c[key] for c in one.values())) for key in ("lines", "modules", "imports")]
    print(render(head, [*rows, total]))


if __name__ == "__main__":
    main()

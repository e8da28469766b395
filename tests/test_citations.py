"""Citations can be opened: pages and headings under docs/ exist, and no text cites a page from elsewhere."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("proxy", "examples", "hooks", "tests", "systemd", "deploy", "proto", "docs")
SUFFIXES = frozenset(
    (".py", ".md", ".yaml", ".yml", ".proto", ".service", ".socket", ".conf", ".sh", ".toml", ".json")
)
PAGE = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]+)?\)")
OUTSIDE = re.compile(
    r"""\b[Rr]eference,?\ (?:[a-z]+\ )?[A-Ia-h](?:\.\d+)+   # reference C.6, reference koordinator a.10
      | \b[Rr]eference\ [A-I]\b                             # reference F
      | \breference\ (?:kubelet|koordinator|peers|performance|testbed)\b
      | \bpeers\ \d+\.\d+                                   # peers 5.2
      | \bDESIGN(?:\.md)?,?\ \d                             # DESIGN 2
      | \b[Kk]oordinator,?\ [a-h]\.\d+                      # koordinator a.10
      | \([a-h]\.\d{1,2}(?:,\ \d+)?\)                       # (a.10, 9)
    """,
    re.VERBOSE,
)


def texts() -> Iterator[tuple[str, str]]:
    """Yield all text files: the path from the root of the repository, and the content."""
    files = [file for name in SOURCES for file in sorted((ROOT / name).rglob("*")) if file.suffix in SUFFIXES]
    for file in [*files, *sorted(ROOT.glob("*.md"))]:
        path = file.relative_to(ROOT).as_posix()
        if "/api/" not in path and file != Path(__file__) and file.is_file():
            yield path, file.read_text(encoding="utf-8", errors="replace")


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    found: dict[str, int] = {}
    result = set(re.findall(r'<a (?:id|name)="([^"]+)"', page))
    for heading in re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = found[slug] = found.get(slug, -1) + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


def missing(page: Path, anchor: str) -> str:
    """Return what does not exist; empty if both do."""
    if not page.exists():
        return "no such file"
    if anchor and page.suffix == ".md" and anchor not in anchors(page.read_text()):
        return "no such heading"
    return ""


def cited_pages() -> Iterator[tuple[str, str, Path, str]]:
    """Yield the citations in texts: the position, the text, the file, and the anchor."""
    for path, text in texts():
        for match in PAGE.finditer(text):
            page, _, anchor = match[0].partition("#")
            yield path, match[0], ROOT / page, anchor
        if path.endswith(".md"):
            for match in LINK.finditer(text):
                here = ROOT / path
                page = (here.parent / match[1]).resolve() if match[1] else here
                yield path, match[0], page, (match[2] or "").removeprefix("#")


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="docs/ is not there")
def test_every_cited_page_and_heading_exists() -> None:
    cited = list(cited_pages())
    assert len(cited) > 100, "the patterns find the existing citations"
    wrong = [f"{at}: {what}: {why}" for at, what, page, anchor in cited if (why := missing(page, anchor))]
    assert wrong == []


def test_no_text_cites_a_page_outside_the_repository() -> None:
    wrong = [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in texts()
        for match in OUTSIDE.finditer(text)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "(kubelet 1.36, reference C.6)",
        "(reference koordinator a.10)",
        "(reference F: sums)",
        "(peers 5.2)",
        "(DESIGN 2)",
        "Koordinator a.10, 2",
        "is taken away (a.7)",
    ],
)
def test_the_old_forms_are_recognized(text: str) -> None:
    assert OUTSIDE.search(text)


MODULE = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+)(?:\.py|/)?`")


def is_module(path: Path) -> bool:
    """Return whether a path is a package or, with its suffix, a module."""
    return path.is_dir() or path.with_suffix(".py").exists()


def test_modules_named_in_pages_exist() -> None:
    """A path in a page, such as ``engine/handle``, is below ``proxy/`` or below the repository."""
    packages = {path.name for path in (ROOT / "proxy").iterdir() if path.is_dir()}
    unknown = {
        f"{page.name}: {name}"
        for page in (*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"))
        if page.name != "CHANGELOG.md"
        for name in MODULE.findall(page.read_text())
        if name.split("/")[0] in packages
        if not any(
            at.is_dir() or at.with_suffix(".py").exists() for at in (ROOT / "proxy" / name, ROOT / name)
        )
    }
    assert not unknown


NAME = re.compile(r"``([a-z_]+(?:\.[A-Za-z_]\w*)+)(?:\(\))?``")
FILES = ("config", "hooks", "attach", "admin", "kubelet", "containerd")
"""Packages whose names also begin file names, keys of the configuration and modules elsewhere."""


def exists(name: str) -> bool:
    """Return whether a dotted name below ``proxy`` is a module, or a name in one."""
    parts = ["proxy", *name.removeprefix("proxy.").split(".")]
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            fields = getattr(found, "__annotations__", {})
            if not hasattr(found, part):
                return part in fields and part == parts[-1]
            found = getattr(found, part)
        return True
    return False


def test_code_named_in_docstrings_exists() -> None:
    """A dotted name such as ``engine.container_create`` is below ``proxy``."""
    packages = {path.stem for path in (ROOT / "proxy").iterdir()} | {"proxy"}
    named = {
        (path, name)
        for path, text in texts()
        if path.startswith("proxy/")
        for name in NAME.findall(text)
        if (top := name.split(".")[0]) in packages and top not in FILES
    }
    assert len(named) > 100, "the pattern finds the existing names"
    assert [f"{path}: {name}" for path, name in sorted(named) if not exists(name)] == []


def named_in_changes(guide: str) -> Iterator[tuple[str, str]]:
    """Yield the files in the table of changes, each with the names in parentheses after it."""
    table = guide.partition("| change | files |")[2].partition("\n## ")[0]
    for match in re.finditer(r"`([\w./*-]+(?:\.(?:py|md|proto|yaml)|/))`(?: \(`(\w+)`\))?", table):
        yield match[1], match[2] or ""


def test_the_table_of_changes_names_files_that_exist_and_what_is_in_them() -> None:
    named = list(named_in_changes((ROOT / "CONTRIBUTING.md").read_text()))
    assert len(named) > 40
    for path, name in named:
        found = [file for top in (ROOT / "proxy", ROOT) for file in top.glob(path.rstrip("/"))]
        assert found, path
        assert not name or name in found[0].read_text(), f"{path} ({name})"


def test_classes_and_constants_of_the_table_of_changes_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| change | files |")[2].partition("\n## ")[0]
    code = "\n".join(path.read_text() for path in (ROOT / "proxy").rglob("*.py"))
    names = set(re.findall(r"`([A-Z]\w+)`", table))
    assert {"PROVIDERS", "TopologyPolicy"} <= names
    defined = {name for name in names if re.search(rf"^\s*(?:class {name}\b|{name}\s*[:=])", code, re.M)}
    assert names - defined == set()

"""The list of files in ``docs/architecture.md`` is the one that ``make create-path`` prints."""

from __future__ import annotations

import re

import pytest

from tests.testkit.create_path import OWNER, ROOT, SHARING, counted, create_paths, lines_by_package, page

PAGE = ROOT.parent / "docs" / "architecture.md"


def listed(text: str) -> list[tuple[str, set[str]]]:
    """Read the list: for each kind of container its first line, and the files below it."""
    found: list[tuple[str, set[str]]] = []
    package = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            found.append((line, set()))
            continue
        if line[2] != " ":
            package, _, line = line.strip().partition(" ")
        names = re.split(r", *", line.strip().rstrip(","))
        found[-1][1].update(f"{package}/{name}.py".removeprefix("./") for name in names)
    return found


@pytest.fixture(scope="module")
def paths() -> dict[str, list[str]]:
    return create_paths()


@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not there")
def test_the_page_lists_the_files_that_a_create_crosses(paths: dict[str, list[str]]) -> None:
    written = re.search(rf"^```\n({re.escape(SHARING)}.*?)^```", PAGE.read_text(), re.M | re.S)
    assert written, "the page has the list"
    assert listed(written[1]) == listed("\n".join(page(paths))), "make create-path prints the new list"


def test_files_that_every_create_must_cross_are_found(paths: dict[str, list[str]]) -> None:
    crossed = {"executor/store.py", "engine/container_create.py", "backends/ledger/file_ledger.py"}
    for kind in (SHARING, OWNER):
        assert crossed <= set(paths[kind])
        assert len(set(paths[kind])) == len(paths[kind])
        assert all((ROOT / path).is_file() for path in paths[kind])
    assert {"engine/reservation.py", "backends/cgroup/cpuset.py"} <= set(paths[OWNER]) - set(paths[SHARING])


def test_only_files_of_the_product_count() -> None:
    files = [f"{ROOT}/relay/flow.py", "/usr/lib/python3/ast.py", f"{ROOT}/demo/client.py", f"{ROOT}/logs.py"]
    assert counted(dict.fromkeys(files)) == ["relay/flow.py", "logs.py"]


def test_a_folded_list_is_read_back() -> None:
    files = [f"relay/{name}{i}.py" for i in range(20) for name in ("flow", "stream")] + ["logs.py"]
    text = "\n".join([SHARING, *lines_by_package(files)])
    assert listed(text) == [(SHARING, set(files))]
    assert max(map(len, text.splitlines())) <= 100

"""docs/hook-points.md is generated from the dataclasses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.hooks import api, reference
from proxy.hooks.answers import FIELDS, Adjustment, Update
from proxy.hooks.events import POINTS, PoolsChanged, PreCreateContainer, Shutdown
from proxy.hooks.reference import class_docs_of, type_text

PAGE = Path(__file__).parents[2] / "docs/hook-points.md"


@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not there")
def test_the_committed_page_matches_the_code() -> None:
    assert PAGE.read_text() == reference.reference(), "make hook-points writes it"


def test_each_point_has_a_section_with_its_facts_and_fields() -> None:
    text = reference.point_text(PreCreateContainer)
    assert text.startswith("\n### pre_create_container\n")
    assert "| `decision` | [`Decision`](#decision) | The placement that it will get. |" in text
    taken = re.search(r"\*\*Takes\*\* (.*?); may be vetoed\.", text, re.DOTALL)
    assert taken is not None
    assert re.findall(r"`(\w+)`", taken[1]) == [f for f in FIELDS if f in PreCreateContainer.TAKES]
    assert "[`validate_create_container`](#validate_create_container)" in text
    assert reference.point_text(Shutdown).endswith("\n**Takes** nothing; cannot be vetoed.\n")


def test_the_overview_has_a_row_for_each_point() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| (.*) \| (.*) \|$", reference.reference(), re.M)
    assert {name for name, _, _ in rows} == set(POINTS)
    reported = {name: (when, answer) for name, when, answer in rows}
    assert reported["pre_start_container"] == ("A container is about to be started.", "updates, veto")
    assert reported["shutdown"][1] == "nothing"


def test_a_point_without_a_call_is_described_with_those_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POINTS, "battery_low", PoolsChanged)
    node_section = reference.reference().partition("## Of the node")[2].partition("\n## ")[0]
    assert node_section.count("`PoolsChanged`: ") == 2


def test_every_link_has_a_section() -> None:
    page = reference.reference()
    sections = {line[4:] for line in page.splitlines() if line.startswith("### ")}
    links = set(re.findall(r"\(#([\w-]+)\)", page))
    assert links <= {section.lower() for section in sections}
    assert set(POINTS) <= sections


def test_described_classes_can_be_imported() -> None:
    machine = {"Machine", "NumaNode", "Cpu"}
    named = {cls.__name__ for cls in (*reference.FACTS, *reference.ANSWERS)}
    assert named - machine <= set(api.__all__)


def test_an_undocumented_field_is_an_error() -> None:
    @dataclass(frozen=True)
    class Undocumented:
        """Something.

        Attributes:
            here: It is.
        """

        here: int
        there: int

    with pytest.raises(ValueError, match="cannot describe Undocumented: there not documented"):
        class_docs_of(Undocumented)


def test_documented_but_missing_fields_and_undocumented_classes_are_errors() -> None:
    @dataclass(frozen=True)
    class More:
        """Something.

        Attributes:
            here, gone: They are.
        """

        here: int

    @dataclass(frozen=True)
    class Silent:
        pass

    with pytest.raises(ValueError, match="cannot describe More: it has no gone"):
        class_docs_of(More)
    with pytest.raises(ValueError, match="cannot describe Silent: its docstring"):
        class_docs_of(Silent)


def test_a_docstring_is_parsed() -> None:
    reported = class_docs_of(Adjustment)
    assert reported.prose == ("The changes that a hook requests.",)
    assert reported.after[0].startswith("Each point lists the fields that it takes")
    assert [row.names for row in reported.rows][:3] == [("cpus",), ("mems",), ("cpu_period", "cpu_quota")]
    assert reported.rows[0].text.endswith("`CLEAR``: the client's request is ignored.")
    update = class_docs_of(Update).rows[-1]
    assert dict(zip(update.names, update.types, strict=True))["unified"] == "Mapping[str, str]"


def test_types_are_described() -> None:
    def described(text: str) -> str:
        return type_text(text, str)

    assert described("Mapping[str, Mount | _Clear]") == "map of str to Mount or CLEAR"
    assert described("Sequence[PodFacts]") == described("tuple[PodFacts, ...]") == "list of PodFacts"
    assert described("Mask | None") == "Mask or None"
    assert described("int | _LeaveOrClear") == "int or CLEAR"
    with pytest.raises(ValueError, match="cannot describe the type 'set\\[int\\]'"):
        described("set[int]")

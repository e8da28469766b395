"""Decisions as plain data and back, and the daemon's answers to queries about a pod."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.executor.decision_history import DecisionHistory
from proxy.model.errors import InputError
from proxy.model.explanation import (
    AllocationStep,
    CpuHolder,
    Explanation,
    Fact,
    Merge,
    MovedContainer,
    ProviderAnswer,
    Shortfall,
)
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Verdict
from proxy.observe.explain_data import from_data, history_page, to_data

RECORDS = Path(__file__).with_name("records")
TEXT = st.text(max_size=5)
NUMBER = st.integers(-(2**70), 2**70)
IDS = st.sets(st.integers(0, 300), max_size=6)
MASKS = st.none() | IDS.map(Mask)
CPUS = IDS.map(CpuSet)
HINTS = st.builds(TopologyHint, MASKS, st.booleans())

REFUSED = Verdict(9, "TopologyAffinityError", "no")


def many(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(strategy, max_size=2).map(tuple)


EXPLANATIONS = st.builds(
    Explanation,
    TEXT,
    TEXT,
    TEXT,
    TEXT,
    NUMBER,
    many(st.builds(Fact, TEXT, TEXT, TEXT)),
    many(st.builds(ProviderAnswer, TEXT, TEXT, TEXT, many(HINTS), st.none() | NUMBER, st.none() | NUMBER)),
    st.none() | st.builds(Merge, TEXT, TEXT, HINTS, st.none() | HINTS, TEXT, many(TEXT)),
    many(st.builds(AllocationStep, TEXT, TEXT)),
    st.builds(Verdict, NUMBER, TEXT, TEXT),
    TEXT,
    CPUS,
    MASKS,
    many(TEXT),
    many(TEXT),
    many(st.builds(MovedContainer, TEXT, CPUS, CPUS)),
    NUMBER,
    many(st.builds(Shortfall, TEXT, MASKS, NUMBER, NUMBER)),
    st.booleans(),
)


@given(EXPLANATIONS)
def test_a_record_is_unchanged_by_a_round_trip(reported: Explanation) -> None:
    assert from_data(json.loads(json.dumps(to_data(reported)))) == reported


def test_every_field_is_written() -> None:
    fields = set(Explanation.__struct_fields__)
    former_names = {"said", "lacks"}
    assert set(to_data(Explanation("e", "a/b", "u"))) == fields - {"answers"} | {"providers"} | former_names


@given(EXPLANATIONS)
def test_former_names_of_fields_are_read_and_written(decision: Explanation) -> None:
    data: Any = to_data(decision)
    assert (data["said"], data["lacks"]) == (data["providers"], data["shortfalls"])
    assert from_data({key: data[key] for key in data if key not in ("providers", "shortfalls")}) == decision
    assert from_data({key: data[key] for key in data if key not in ("said", "lacks")}) == decision
    if decision.merge is not None:
        assert data["merge"]["blame"] == data["merge"]["conflicts"]
        for name in ("blame", "conflicts"):
            merge = {key: value for key, value in data["merge"].items() if key != name}
            assert from_data({**data, "merge": merge}) == decision


def test_the_fields_of_a_record_are_as_documented() -> None:
    reported = Explanation(
        "CreateContainer",
        "ns/p",
        "u",
        "c",
        1,
        (Fact("cpu request", "2", "x"),),
        (
            ProviderAnswer(
                "cpu",
                "cpu",
                "",
                (TopologyHint(Mask((0, 2)), preferred=False), TopologyHint(None, preferred=True)),
                None,
                1,
            ),
        ),
        Merge("restricted", "pod", TopologyHint(Mask((0,)), preferred=True), None, "why", ("b",)),
        (AllocationStep("cpu", "core 0"),),
        Verdict(9, "R", "m"),
        "own",
        CpuSet.parse("0-3,8"),
        Mask((0, 1)),
        ("d",),
        ("because",),
        (MovedContainer("a/b/c", CpuSet.parse("0-7"), CpuSet.parse("4-7")),),
        3,
        (
            Shortfall(
                "cpu", None, 5, 4, 2, 9, CpuSet.parse("1-2"), (CpuHolder("a/b/c", CpuSet.parse("2")),), 3
            ),
        ),
    )
    data = to_data(reported)
    assert (data.pop("said"), data.pop("lacks")) == (data["providers"], data["shortfalls"])
    assert data == {
        "event": "CreateContainer",
        "pod": "ns/p",
        "uid": "u",
        "container": "c",
        "attempt": 1,
        "verdict": {"admitted": False, "code": 9, "reason": "R", "message": "m"},
        "pool": "own",
        "cpus": "0-3,8",
        "mems": [0, 1],
        "devices": ["d"],
        "reasons": ["because"],
        "facts": [{"what": "cpu request", "value": "2", "source": "x"}],
        "providers": [
            {
                "provider": "cpu",
                "resource": "cpu",
                "nothing": "",
                "count": None,
                "preferred": 1,
                "hints": [{"nodes": [0, 2], "preferred": False}, {"nodes": None, "preferred": True}],
            }
        ],
        "merge": {
            "policy": "restricted",
            "scope": "pod",
            "best": {"nodes": [0], "preferred": True},
            "runner_up": None,
            "decided": "why",
            "conflicts": ["b"],
            "blame": ["b"],
        },
        "steps": [{"provider": "cpu", "what": "core 0"}],
        "moved": [{"ref": "a/b/c", "before": "0-7", "after": "4-7"}],
        "more_moved": 3,
        "shortfalls": [
            {
                "resource": "cpu",
                "nodes": None,
                "wanted": 5,
                "free": 4,
                "kept": 2,
                "most": 9,
                "named": "1-2",
                "holders": [{"ref": "a/b/c", "cpus": "2"}],
                "more_holders": 3,
            }
        ],
        "applied": True,
    }


def test_a_record_of_an_older_version_was_applied() -> None:
    data = to_data(Explanation("CreateContainer", "ns/p", "u", applied=False))
    assert not from_data(data).applied
    del data["applied"]
    assert from_data(data).applied


def test_missing_fields_have_defaults_and_unknown_ones_are_ignored() -> None:
    assert from_data({"event": "e", "pod": "a/b", "new": 1}) == Explanation("e", "a/b", "")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "cannot read decision: it is null, not a mapping"),
        ([], "cannot read decision: it is a list, not a mapping"),
        ({"pod": 7}, "cannot read decision: pod is a number, not a string"),
        ({"attempt": True}, "attempt is true or false, not a number"),
        ({"attempt": 1.5}, "attempt is a fraction, not a number"),
        ({"cpus": "3-1"}, "cpus names no CPUs: range '3-1'"),
        ({"mems": [-1]}, "mems is a list, not a list of node ids"),
        ({"mems": "0"}, "mems is a string, not a list of node ids"),
        ({"mems": [65536]}, "mems is a list, not a list of node ids"),
        ({"devices": [1]}, "devices is a list, not a list of strings"),
        ({"verdict": []}, "cannot read verdict: it is a list"),
        ({"verdict": {"code": "x"}}, "cannot read verdict: code is a string, not a number"),
        ({"facts": {}}, "facts is a mapping, not a list"),
        (
            {"said": [{}, {"hints": [{"preferred": 1}]}]},
            r"decision.said\[1\].hints\[0\]: preferred is a number",
        ),
        ({"merge": {"best": {"nodes": 1}}}, "cannot read merge.best: nodes is a number"),
        ({"moved": [{"before": "x"}]}, r"decision.moved\[0\]: before names no CPUs"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_data(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70000) | st.text("0-1,x", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from([*to_data(Explanation("", "", "")), "best", "hints", "nodes"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_data_is_read_or_refused(data: object) -> None:
    try:
        reported = from_data(data)
    except InputError:
        return
    assert from_data(to_data(reported)) == reported


def decision(container: str, attempt: int = 0, verdict: Verdict = REFUSED) -> Explanation:
    return Explanation("CreateContainer", "ns/web", "u-web", container, attempt, verdict=verdict)


@pytest.fixture
def history() -> DecisionHistory:
    history = DecisionHistory()
    history.note(1.5, decision("app"))
    history.note(2.5, decision("app", 1, Verdict()), "0123456789")
    history.note(3.5, decision("side"))
    history.note(4.5, Explanation("CreateContainer", "ns/db", "u-db", "db", verdict=REFUSED))
    return history


def test_a_query_returns_the_matching_records(history: DecisionHistory) -> None:
    page = history_page(history, {"query": "web/app"})
    assert json.loads(json.dumps(page)) == page
    assert page == {
        "schema": "topoproxy-explain/1",
        "query": "web/app",
        "records": [
            {"when": 1.5, "id": "", "there": False, "decision": to_data(decision("app"))},
            {
                "when": 2.5,
                "id": "0123456789",
                "there": True,
                "decision": to_data(decision("app", 1, Verdict())),
            },
        ],
        "pods": [],
        "remembered": 4,
    }


@pytest.mark.parametrize("params", [{}, {"query": ""}, {"query": "missing"}])
def test_a_query_without_a_match_lists_the_pods(history: DecisionHistory, params: dict[str, str]) -> None:
    page = history_page(history, params)
    assert page["records"] == []
    assert page["remembered"] == 4
    assert page["pods"] == [
        {
            "pod": "ns/web",
            "uid": "u-web",
            "when": 3.5,
            "records": 3,
            "containers": ["app", "side"],
            "refused": "TopologyAffinityError",
            "there": True,
            "applied": True,
        },
        {
            "pod": "ns/db",
            "uid": "u-db",
            "when": 4.5,
            "records": 1,
            "containers": ["db"],
            "refused": "TopologyAffinityError",
            "there": False,
            "applied": True,
        },
    ]


def test_the_limit_keeps_the_newest(history: DecisionHistory) -> None:
    records = history_page(history, {"query": "web", "limit": "2"})["records"]
    assert isinstance(records, list)
    assert [record["when"] for record in records] == [2.5, 3.5]
    pods = history_page(history, {"limit": "1"})["pods"]
    assert isinstance(pods, list)
    assert [pod["pod"] for pod in pods] == ["ns/db"]


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "9999999", "\u0663"])
def test_an_invalid_limit_is_refused(history: DecisionHistory, limit: str) -> None:
    with pytest.raises(InputError, match=r"cannot explain: limit is .*, not a number from 1 to 999999"):
        history_page(history, {"limit": limit})


def test_an_unknown_parameter_is_refused(history: DecisionHistory) -> None:
    with pytest.raises(InputError, match="'pod' is not a parameter"):
        history_page(history, {"pod": "x"})


def test_existing_containers_have_their_present_state(history: DecisionHistory) -> None:
    page = history_page(history, {"query": "web"}, lambda record: f"now {record.container_id}")
    assert [record.get("now") for record in page["records"]] == [None, "now 0123456789", None]
    silent = history_page(history, {"query": "web"}, lambda container: "")
    assert silent == history_page(history, {"query": "web"})

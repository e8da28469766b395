"""What the daemon answers to a question about a pod."""

from __future__ import annotations

import json

import pytest

from proxy.executor.history import History
from proxy.model.errors import InputError
from proxy.model.explanation import Explanation
from proxy.model.workload import Verdict
from proxy.observe.explain_answer import history_page
from proxy.observe.explain_data import to_data

REFUSED = Verdict(9, "TopologyAffinityError", "no")


def decision(container: str, attempt: int = 0, verdict: Verdict = REFUSED) -> Explanation:
    return Explanation("CreateContainer", "ns/web", "u-web", container, attempt, verdict=verdict)


@pytest.fixture
def history() -> History:
    history = History()
    history.note(1.5, decision("app"))
    history.note(2.5, decision("app", 1, Verdict()), "0123456789")
    history.note(3.5, decision("side"))
    history.note(4.5, Explanation("CreateContainer", "ns/db", "u-db", "db", verdict=REFUSED))
    return history


def test_records_that_a_query_finds(history: History) -> None:
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
def test_without_a_find_the_pods_are_listed(history: History, params: dict[str, str]) -> None:
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


def test_the_limit_keeps_the_newest(history: History) -> None:
    records = history_page(history, {"query": "web", "limit": "2"})["records"]
    assert isinstance(records, list)
    assert [record["when"] for record in records] == [2.5, 3.5]
    pods = history_page(history, {"limit": "1"})["pods"]
    assert isinstance(pods, list)
    assert [pod["pod"] for pod in pods] == ["ns/db"]


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "9999999", "\u0663"])
def test_an_invalid_limit(history: History, limit: str) -> None:
    with pytest.raises(InputError, match=r"cannot explain: limit is .*, not a number from 1 to 999999"):
        history_page(history, {"limit": limit})


def test_an_unknown_parameter(history: History) -> None:
    with pytest.raises(InputError, match="'pod' is no parameter"):
        history_page(history, {"pod": "x"})


def test_what_holds_now_for_those_that_are_there(history: History) -> None:
    page = history_page(history, {"query": "web"}, lambda record: f"now {record.container_id}")
    assert [record.get("now") for record in page["records"]] == [None, "now 0123456789", None]
    silent = history_page(history, {"query": "web"}, lambda container: "")
    assert silent == history_page(history, {"query": "web"})

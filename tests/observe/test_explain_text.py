"""The page of ``topoproxy explain``, for any answer of a daemon."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.errors import InputError
from proxy.model.explanation import FOUND, RESTORED, Explanation
from proxy.model.workload import Verdict
from proxy.observe.explain_data import to_data
from proxy.observe.explain_text import known_names, newest, read_records, render, render_pods


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def entry(
    ref: str, uid: str = "u", attempt: int = 0, verdict: Verdict | None = None, **more: object
) -> dict[str, object]:
    namespace, pod, *container = ref.split("/")
    reported = Explanation(
        "CreateContainer",
        f"{namespace}/{pod}",
        uid,
        *container,
        attempt=attempt,
        verdict=verdict or Verdict(),
    )
    return {
        "when": 1790000000.25,
        "id": "0123456789abcdef",
        "there": True,
        "decision": to_data(reported),
        **more,
    }


def page(*entries: dict[str, object], older: int = 0) -> str:
    return render(read_records({"records": list(entries)}), 100, older=older)


def test_the_page_of_a_decision_is_printed() -> None:
    assert page(entry("ns/p", id="sandbox"), entry("ns/p/c", attempt=2), older=3) == (
        "[2026-09-21 14:13:20, CreateContainer, sandbox sandbox]\n"
        "Pod ns/p was admitted.\n"
        "\n"
        "[2026-09-21 14:13:20, CreateContainer, attempt 2, container 0123456789abc]\n"
        "ns/p/c was admitted.\n"
        "\n"
        "3 older decisions are remembered; --all shows them.\n"
    )
    assert page(entry("ns/p/c"), older=1).endswith("\n\n1 older decision is remembered; --all shows it.\n")


def test_a_container_that_no_call_created_is_said_to_be_found_or_read() -> None:
    found, restored = entry("ns/p/c"), entry("ns/p/d")
    found["decision"]["event"], restored["decision"]["event"] = FOUND, RESTORED  # type: ignore[index]
    assert page(found, restored) == (
        "[2026-09-21 14:13:20, found at the runtime, container 0123456789abc]\n"
        "ns/p/c was adopted.\n"
        "\n"
        "[2026-09-21 14:13:20, read from the ledger, container 0123456789abc]\n"
        "ns/p/d was admitted.\n"
    )


def test_the_present_state_is_printed() -> None:
    reported = page(entry("ns/p/c", now="BE is suppressed: it runs on 0-1 now.\x07"), entry("ns/p/d"))
    assert reported.splitlines()[1:3] == [
        "ns/p/c was admitted.",
        "Now: BE is suppressed: it runs on 0-1 now.?",
    ]
    assert reported.count("Now:") == 1


def test_removed_containers_and_missing_ids_are_printed() -> None:
    assert page(entry("ns/p/c", there=False, id="")).startswith(
        "[2026-09-21 14:13:20, CreateContainer, gone]\n"
    )
    refused = page(entry("ns/p/c", there=False, id="", verdict=Verdict(9, "R", "m")))
    assert refused.startswith("[2026-09-21 14:13:20, CreateContainer]\nns/p/c was rejected: m.\n")
    assert page(entry("ns/p/c", when="x", id=None)).startswith("[CreateContainer]\n")
    assert page(entry("ns/p/c", when=1e300)).startswith("[CreateContainer, container ")


def test_the_newest_decision_of_each_container_is_printed() -> None:
    records = read_records(
        {
            "records": [
                entry("ns/p/a", "old", when=1),
                entry("ns/p", "new", when=2),
                entry("ns/p/a", "new", when=3),
                entry("other/p/a", "x", when=4),
                entry("ns/p/b", "new", when=5),
                entry("ns/p/a", "new", when=6),
            ]
        }
    )
    assert [reported.data["when"] for reported in newest(records)] == [2, 4, 5, 6]
    assert newest([]) == []


def test_the_list_of_pods_is_printed() -> None:
    pods = [
        {"pod": "ns/p", "when": 0, "records": 2, "containers": ["a", "b"], "refused": "", "there": True},
        {"pod": "ns/long-name", "when": 60, "records": 11, "containers": [], "refused": "", "there": False},
        {
            "pod": "ns/q",
            "when": 3600,
            "records": 1,
            "containers": list("abcdef"),
            "refused": "R",
            "there": False,
        },
    ]
    assert render_pods({"pods": pods}) == (
        "NEWEST DECISION      POD           DECISIONS  CONTAINERS\n"
        "1970-01-01 00:00:00  ns/p          2          a, b\n"
        "1970-01-01 00:01:00  ns/long-name  11         -                       gone\n"
        "1970-01-01 01:00:00  ns/q          1          a, b, c, d, and 2 more  REJECTED: R\n"
        "\n"
        "topoproxy explain POD[/CONTAINER] shows why.\n"
    )


def test_an_empty_history_is_printed() -> None:
    assert render_pods({"pods": []}).startswith("No decision is remembered")


def test_the_known_names_are_those_of_the_answer() -> None:
    pods = [{"pod": "ns/p", "containers": ["a"]}, {"pod": "ns/q"}, {}, "x"]
    assert known_names({"pods": pods}) == ["ns/p", "p", "ns/p/a", "ns/q", "q"]


@pytest.mark.parametrize(
    "answer", [None, [], {}, {"records": {}}, {"records": [1]}, {"records": [{}]}, "ok\n"]
)
def test_an_invalid_answer_is_refused(answer: object) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_records(answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1, 1e9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["pods", "pod", "containers", "when", "records", "refused"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_answer_of_the_daemon_gives_a_list(answer: object) -> None:
    text = render_pods(answer)
    assert text.endswith(".\n")
    assert all(c.isprintable() or c == "\n" for c in text)
    known_names(answer)

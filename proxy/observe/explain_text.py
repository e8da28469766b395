"""Renders the daemon's answer to ``/explain`` as text for the terminal.

The answer may come from an older or a newer daemon, so an unexpected part is refused by name or left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from proxy.model.errors import InputError
from proxy.model.explanation import FOUND, RESTORED, Explanation
from proxy.observe.explain_data import from_data
from proxy.observe.json_access import table
from proxy.observe.sentences import render_decision, wrap
from proxy.observe.value_text import clean, join_first

_EVENTS = {FOUND: "found at the runtime", RESTORED: "read from the ledger"}
"""Events that are not calls, as text."""


class ExplainedDecision(Struct, frozen=True):
    """One remembered decision as the daemon reported it.

    Attributes:
        data: The daemon's answer.
        decision: The decision in it.
    """

    data: Mapping[str, object]
    decision: Explanation


def read_records(answer: object) -> list[ExplainedDecision]:
    """Return the records of an answer, oldest first.

    Raises:
        InputError: It is not an answer of a daemon.
    """
    data = answer if isinstance(answer, Mapping) else {}
    records = data.get("records")
    if not isinstance(records, list) or not all(isinstance(entry, Mapping) for entry in records):
        raise InputError("cannot read the daemon's answer: it has no records")
    return [ExplainedDecision(entry, from_data(entry.get("decision"))) for entry in records]


def newest(records: Sequence[ExplainedDecision]) -> list[ExplainedDecision]:
    """Keep the newest decision of each container and of the pod itself; of pods of one name, the newest."""
    uids = {record.decision.pod: record.decision.uid for record in records}
    latest: dict[str, int] = {}
    for number, record in enumerate(records):
        if record.decision.uid == uids[record.decision.pod]:
            latest[record.decision.ref] = number
    return [records[number] for number in sorted(latest.values())]


def render(shown: Sequence[ExplainedDecision], width: int, *, older: int = 0) -> str:
    """Write decisions.

    Args:
        shown: The decisions, oldest first.
        width: Columns of the terminal.
        older: How many more there are that are not shown.
    """
    parts = [
        "\n".join(
            [
                *wrap(_circumstances(record), width),
                render_decision(record.decision, width).rstrip("\n"),
                *(wrap(clean(f"Now: {record.data['now']}"), width) if record.data.get("now") else ()),
            ]
        )
        for record in shown
    ]
    if older:
        parts.append(
            f"{older} older {'decision is' if older == 1 else 'decisions are'} remembered; --all shows "
            f"{'it' if older == 1 else 'them'}."
        )
    return "\n\n".join(parts) + "\n"


def render_pods(answer: object) -> str:
    """Write the pods with decisions: a line for each, the one with the newest decision last."""
    pods = _pods(answer)
    if not pods:
        return "No decision is remembered. The setting explainHistory limits those of ended containers.\n"
    rows = [("NEWEST DECISION", "POD", "DECISIONS", "CONTAINERS", "")]
    for pod in pods:
        names = pod.get("containers")
        containers = [clean(str(name)) for name in names] if isinstance(names, list) else []
        rows.append(
            (
                _when(pod.get("when")),
                clean(str(pod.get("pod", ""))),
                clean(str(pod.get("records", ""))),
                join_first(containers, 4) or "-",
                _state(pod),
            )
        )
    return "\n".join([*table(rows), "", "topoproxy explain POD[/CONTAINER] shows why."]) + "\n"


def known_names(answer: object) -> list[str]:
    """Return the names in an answer: pods with and without their namespace, and containers."""
    names: dict[str, None] = {}
    for pod in _pods(answer):
        ref = clean(str(pod.get("pod", "")))
        names[ref] = names[ref.partition("/")[2]] = None
        containers = pod.get("containers")
        for container in containers if isinstance(containers, list) else []:
            names[f"{ref}/{clean(str(container))}"] = None
    return [name for name in names if name]


def _pods(answer: object) -> list[Mapping[str, object]]:
    pods = answer.get("pods") if isinstance(answer, Mapping) else None
    return [pod for pod in pods if isinstance(pod, Mapping)] if isinstance(pods, list) else []


def _circumstances(record: ExplainedDecision) -> str:
    decision, container_id = record.decision, record.data.get("id")
    parts = [_when(record.data.get("when")), _EVENTS.get(decision.event) or clean(decision.event)]
    parts.append(f"attempt {decision.attempt}" if decision.attempt else "")
    kind = "container" if decision.container else "sandbox"
    parts.append(
        f"{kind} {clean(container_id)[:13]}" if isinstance(container_id, str) and container_id else ""
    )
    was_there = decision.verdict.admitted or (not decision.applied and bool(container_id))
    parts.append("gone" if was_there and record.data.get("there") is False else "")
    return f"[{', '.join(part for part in parts if part)}]"


def _state(pod: Mapping[str, object]) -> str:
    rejected = clean(str(pod.get("refused") or ""))
    if rejected:
        return f"{'WOULD BE REJECTED' if pod.get('applied') is False else 'REJECTED'}: {rejected}"
    return "gone" if pod.get("there") is False else ""


def _when(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
        except (OverflowError, ValueError, OSError):
            return ""
    return ""

"""Answers ``/explain``: returns the decisions in the history as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proxy.executor.decision_log import PodLine, RememberedDecision
from proxy.executor.history import History
from proxy.model import schema_ids
from proxy.model.errors import InputError
from proxy.observe.explain_data import to_data

MOST = 500
"""How many records, or pods, are returned unless a number is requested."""


def history_page(
    history: History, params: Mapping[str, str], now: Callable[[RememberedDecision], str] = lambda record: ""
) -> dict[str, object]:
    """Answer a question.

    Args:
        history: What is remembered.
        params: ``query``: what is meant (``History.find`` says what it may be); ``limit``: how many of the
            newest records, or pods, to give.
        now: Returns the current facts about a container that still exists; empty where it does not.

    Returns:
        ``records``, the newest last: those that the query found, none without a query. ``pods``, the newest
        last: all that is known of, where there is no query or it found nothing. ``remembered``: how many
        records there are in all.

    Raises:
        InputError: A parameter is unknown, or the limit is not a number.
    """
    for name in params:
        if name not in ("query", "limit"):
            raise InputError(f"cannot explain: {name!r} is no parameter (query, limit)")
    most = _limit(params.get("limit", ""))
    query = params.get("query", "")
    found = history.find(query)
    pods = [] if found else history.pods()
    return {
        "schema": schema_ids.EXPLAIN,
        "query": query,
        "records": [_with(record, now) for record in found[-most:]],
        "pods": [_pod_data(line) for line in pods[-most:]],
        "remembered": history.size,
    }


def record_data(record: RememberedDecision) -> dict[str, object]:
    """Return a record as plain data."""
    return {
        "when": record.when,
        "id": record.container_id,
        "there": record.there,
        "decision": to_data(record.explanation),
    }


def _with(record: RememberedDecision, now: Callable[[RememberedDecision], str]) -> dict[str, object]:
    """Return a record as plain data, with ``now`` where its container exists and something has changed."""
    data, text = record_data(record), now(record) if record.there else ""
    return {**data, "now": text} if text else data


def _pod_data(line: PodLine) -> dict[str, object]:
    return {
        "pod": line.pod,
        "uid": line.uid,
        "when": line.when,
        "records": line.records,
        "containers": list(line.containers),
        "refused": line.refused,
        "there": line.there,
        "applied": line.applied,
    }


def _limit(text: str) -> int:
    if not text:
        return MOST
    if text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0:
        return int(text)
    raise InputError(f"cannot explain: limit is {text[:20]!r}, not a number from 1 to 999999")

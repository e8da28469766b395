"""Converts a decision to plain data for JSON, and back, and answers ``/explain``.

docs/explain.md has the names of the fields.

CPUs are Linux lists (``"0-3,8"``), NUMA nodes are lists of ids (null where any will do). Writing gives every
field, whatever its value. Reading takes what an older or newer version has written: a missing field gets its
default, an unknown one is ignored, and a field that is there must have its type. ``said`` and ``lacks`` are
the former names of ``providers`` and ``shortfalls``, written for one release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeGuard, TypeVar

from proxy.executor.decision_log import PodLine, RememberedDecision
from proxy.executor.history import History
from proxy.model import schema_ids
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

Data = dict[str, object]
T = TypeVar("T")

MOST = 500
"""How many records, or pods, are returned unless a number is requested."""


def history_page(
    history: History, params: Mapping[str, str], now: Callable[[RememberedDecision], str] = lambda record: ""
) -> dict[str, object]:
    """Answer a query.

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


def to_data(record: Explanation) -> Data:
    """Return a decision as plain data."""
    verdict = record.verdict
    providers = [_answer(each) for each in record.answers]
    shortfalls = [_shortfall(each) for each in record.shortfalls]
    return {
        "event": record.event,
        "pod": record.pod,
        "uid": record.uid,
        "container": record.container,
        "attempt": record.attempt,
        "verdict": {
            "admitted": verdict.admitted,
            "code": verdict.code,
            "reason": verdict.reason,
            "message": verdict.operator_message,
        },
        "pool": record.pool,
        "cpus": str(record.cpus),
        "mems": _ids(record.mems),
        "devices": list(record.devices),
        "reasons": list(record.reasons),
        "facts": [{"what": f.what, "value": f.value, "source": f.source} for f in record.facts],
        "providers": providers,
        "said": providers,
        "merge": _merge(record.merge),
        "steps": [{"provider": s.provider, "what": s.what} for s in record.steps],
        "moved": [{"ref": m.ref, "before": str(m.before), "after": str(m.after)} for m in record.moved],
        "more_moved": record.more_moved,
        "shortfalls": shortfalls,
        "lacks": shortfalls,
        "applied": record.applied,
    }


def from_data(data: object) -> Explanation:
    """Read a decision.

    Raises:
        InputError: The data are not those of a decision; the message names the field.
    """
    top = _FieldReader(data, "decision")
    verdict = _FieldReader(top.get("verdict", {}), "verdict")
    merge = top.get("merge", None)
    return Explanation(
        event=top.text("event"),
        pod=top.text("pod"),
        uid=top.text("uid"),
        container=top.text("container"),
        attempt=top.number("attempt"),
        facts=top.each("facts", lambda r: Fact(r.text("what"), r.text("value"), r.text("source"))),
        answers=top.each(top.either("providers", "said"), _read_answer),
        merge=None if merge is None else _read_merge(_FieldReader(merge, "merge")),
        steps=top.each("steps", lambda r: AllocationStep(r.text("provider"), r.text("what"))),
        verdict=Verdict(verdict.number("code"), verdict.text("reason"), verdict.text("message")),
        pool=top.text("pool"),
        cpus=top.cpus("cpus"),
        mems=top.nodes("mems"),
        devices=top.texts("devices"),
        reasons=top.texts("reasons"),
        moved=top.each("moved", lambda r: MovedContainer(r.text("ref"), r.cpus("before"), r.cpus("after"))),
        more_moved=top.number("more_moved"),
        shortfalls=top.each(top.either("shortfalls", "lacks"), _read_shortfall),
        applied=top.yes("applied", default=True),
    )


def _ids(mask: Mask | None) -> list[int] | None:
    return None if mask is None else list(mask)


def _hint(hint: TopologyHint | None) -> Data | None:
    return None if hint is None else {"nodes": _ids(hint.affinity), "preferred": hint.preferred}


def _shortfall(shortfall: Shortfall) -> Data:
    return {
        "resource": shortfall.resource,
        "nodes": _ids(shortfall.nodes),
        "wanted": shortfall.wanted,
        "free": shortfall.free,
        "kept": shortfall.kept,
        "most": shortfall.most,
        "named": str(shortfall.named),
        "holders": [{"ref": holder.ref, "cpus": str(holder.cpus)} for holder in shortfall.holders],
        "more_holders": shortfall.more_holders,
    }


def _read_shortfall(reader: _FieldReader) -> Shortfall:
    return Shortfall(
        reader.text("resource"),
        reader.nodes("nodes"),
        reader.number("wanted"),
        reader.number("free"),
        reader.number("kept"),
        None if reader.get("most", None) is None else reader.number("most"),
        reader.cpus("named"),
        reader.each("holders", lambda r: CpuHolder(r.text("ref"), r.cpus("cpus"))),
        reader.number("more_holders"),
    )


def _answer(answer: ProviderAnswer) -> Data:
    return {
        "provider": answer.provider,
        "resource": answer.resource,
        "nothing": answer.nothing,
        "count": answer.count,
        "preferred": answer.preferred,
        "hints": [_hint(hint) for hint in answer.hints],
    }


def _merge(merge: Merge | None) -> Data | None:
    if merge is None:
        return None
    return {
        "policy": merge.policy,
        "scope": merge.scope,
        "best": _hint(merge.best),
        "runner_up": _hint(merge.runner_up),
        "decided": merge.decided,
        "blame": list(merge.blame),
    }


class _FieldReader:
    """One mapping, read field by field."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, Mapping):
            raise InputError(f"cannot read {where}: it is {_kind(data)}, not a mapping")
        self._data = data
        self._where = where

    def get(self, name: str, default: object) -> object:
        value: object = self._data.get(name, default)
        return value

    def either(self, name: str, former: str) -> str:
        """Return the key that exists: the name, or the former name of an older version."""
        return former if name not in self._data and former in self._data else name

    def text(self, name: str) -> str:
        value = self.get(name, "")
        if isinstance(value, str):
            return value
        raise self._wrong(name, value, "a text")

    def number(self, name: str) -> int:
        value = self.get(name, 0)
        if _is_number(value):
            return value
        raise self._wrong(name, value, "a number")

    def count(self, name: str) -> int | None:
        return None if self.get(name, 0) is None else self.number(name)

    def yes(self, name: str, *, default: bool = False) -> bool:
        value = self.get(name, default)
        if isinstance(value, bool):
            return value
        raise self._wrong(name, value, "true or false")

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.get(name, [])
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
        raise self._wrong(name, value, "a list of texts")

    def cpus(self, name: str) -> CpuSet:
        value = self.text(name)
        try:
            return CpuSet.parse(value)
        except ValueError as error:
            raise InputError(f"cannot read {self._where}: {name} names no CPUs: {error}") from error

    def nodes(self, name: str) -> Mask | None:
        value = self.get(name, None)
        if value is None:
            return None
        if isinstance(value, list) and all(_is_number(v) and 0 <= v < Mask.LIMIT for v in value):
            return Mask(value)
        raise self._wrong(name, value, "a list of node ids")

    def hint(self, name: str) -> TopologyHint:
        return _read_hint(_FieldReader(self.get(name, {}), f"{self._where}.{name}"))

    def each(self, name: str, read: Callable[[_FieldReader], T]) -> tuple[T, ...]:
        value = self.get(name, [])
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return tuple(read(_FieldReader(entry, f"{self._where}.{name}[{i}]")) for i, entry in enumerate(value))

    def _wrong(self, name: str, value: object, wanted: str) -> InputError:
        return InputError(f"cannot read {self._where}: {name} is {_kind(value)}, not {wanted}")


def _read_hint(reader: _FieldReader) -> TopologyHint:
    return TopologyHint(reader.nodes("nodes"), reader.yes("preferred"))


def _read_answer(reader: _FieldReader) -> ProviderAnswer:
    return ProviderAnswer(
        reader.text("provider"),
        reader.text("resource"),
        reader.text("nothing"),
        reader.each("hints", _read_hint),
        reader.count("count"),
        reader.count("preferred"),
    )


def _read_merge(reader: _FieldReader) -> Merge:
    return Merge(
        reader.text("policy"),
        reader.text("scope"),
        reader.hint("best"),
        None if reader.get("runner_up", None) is None else reader.hint("runner_up"),
        reader.text("decided"),
        reader.texts("blame"),
    )


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "true or false", str: "a text", int: "a number", float: "a fraction"}
    return names.get(type(value), "a list" if isinstance(value, list) else "a mapping")

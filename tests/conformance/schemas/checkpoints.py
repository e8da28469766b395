"""State files of kubelet: which version they are, and the text whose hash is their checksum."""

from __future__ import annotations

from proxy.kubelet.checkpoints import read_cpu, read_memory
from tests.conformance.cases import Case, Outcome, Topologies

_READERS = {"cpu_manager_state": read_cpu, "memory_manager_state": read_memory}


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _READERS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    got = _READERS[kind](case.value("file", str))
    shown = {"checksum": got.checksum, "version": got.version, "text": got.text or None}
    expected = {
        "checksum": case.value("checksum", int),
        "version": case.value("version", (int, type(None))),
        "text": case.value("hashed_text", (str, type(None))),
    }
    return Outcome(
        {**expected, "valid": case.value("valid", bool)}, {**shown, "valid": got.version is not None}
    )

"""State files of kubelet: which version they are, and the text whose hash is their checksum."""

from __future__ import annotations

from proxy.backends.kubelet.checkpoints import CheckpointError, read_cpu_checkpoint, read_memory_checkpoint
from tests.conformance.cases import Case, Outcome, Topologies

_READERS = {"cpu_manager_state": read_cpu_checkpoint, "memory_manager_state": read_memory_checkpoint}


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _READERS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    expected = {
        "checksum": case.optional("checksum", int),
        "version": case.optional("version", int),
        "text": case.optional("hashed_text", str),
        "valid": case.value("valid", bool),
    }
    try:
        read = _READERS[kind](case.value("file", str))
    except CheckpointError:
        got = {"checksum": expected["checksum"], "version": None, "text": None, "valid": False}
    else:
        valid = read.version is not None
        got = {"checksum": read.checksum, "version": read.version, "text": read.text or None, "valid": valid}
    return Outcome(expected, {name: got[name] for name in expected})

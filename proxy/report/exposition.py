"""Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Labels = Mapping[str, object]
Sample = tuple[Labels, float]


def family(name: str, kind: str, words: str, samples: Sequence[Sample]) -> str:
    """Write a metric with all its samples.

    Args:
        name: Without ``topoproxy_``.
        kind: ``gauge`` or ``counter``.
        words: What it is.
        samples: Labels and value.
    """
    full = f"topoproxy_{name}"
    lines = [f"# HELP {full} {words}", f"# TYPE {full} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{full}{{{inside}}} {_number(value)}" if inside else f"{full} {_number(value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(text: object) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

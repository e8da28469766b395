"""How long merging hints takes: ``.venv/bin/python bench/place_merge.py``.

Milliseconds depend on the machine; the ratio is to a bare loop of a million steps in the same run.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from proxy.allocation.distance import Distances
from proxy.allocation.merge import merge
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask

ROUNDS = 15
BARS = {2: 2.0, 3: 3.0, 4: 5.0}
"""Milliseconds allowed for 8 nodes, by number of resources."""

Hints = Sequence[TopologyHint]


def hints(nodes: int, sizes: Sequence[int], preferred: int = 0) -> list[TopologyHint]:
    """All masks of some sizes; the masks of one size are preferred."""
    return [
        TopologyHint(Mask(ids), preferred=size == preferred)
        for size in sizes
        for ids in itertools.combinations(range(nodes), size)
    ]


def millis(work: Callable[[], object]) -> float:
    samples = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def bare_loop() -> None:
    for _ in range(1_000_000):
        pass


def cases() -> list[tuple[str, list[Hints], int, float | None]]:
    full = range(1, 9)
    found: list[tuple[str, list[Hints], int, float | None]] = []
    for count, bar in BARS.items():
        agree: list[Hints] = [hints(8, full, preferred=1) for _ in range(count)]
        clash: list[Hints] = [hints(8, full, preferred=1 + i % 2) for i in range(count)]
        found += [
            (f"8 nodes, 255 hints, {count} resources, a preferred one", agree, 8, bar),
            (f"8 nodes, 255 hints, {count} resources, none preferred", clash, 8, bar),
        ]
    few = (1, 2)
    found += [
        ("64 nodes, 2080 hints, 3 resources, a preferred one", [hints(64, few, 1)] * 3, 64, None),
        (
            "64 nodes, 2080 hints, 3 resources, none preferred",
            [hints(64, few, i % 2 + 1) for i in range(3)],
            64,
            None,
        ),
        ("64 nodes, 64 hints of 63 nodes, 4 resources", [hints(64, (63,))] * 4, 64, None),
        (
            "16 nodes, 65535 hints, 2 resources, none preferred",
            [hints(16, range(1, 17), i) for i in (1, 2)],
            16,
            None,
        ),
    ]
    return found


def main() -> int:
    loop = millis(bare_loop)
    print(f"bare loop of 1,000,000 steps: {loop:.2f} ms")
    table = {a: {b: 10 + abs(a - b) for b in range(64)} for a in range(64)}
    late = 0
    for name, lists, nodes, bar in cases():
        whole = Mask(range(nodes))
        plain = millis(partial(merge, lists, whole))
        close = millis(partial(merge, lists, whole, Distances(table)))
        verdict = (
            "" if bar is None else f"  bar {bar:.0f} ms: {'ok' if max(plain, close) < bar else 'MISSED'}"
        )
        late += "MISSED" in verdict
        print(f"{name}: {plain:.3f} ms ({plain / loop:.3f} loops), closest {close:.3f} ms{verdict}")
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())

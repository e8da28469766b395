"""Measures the ledger's cost for a create of an owner, and the growth of the file: a command by itself

    .venv/bin/python bench/ledger_figures.py

Such a create waits for one batch: the placement, in flight. The run makes it as the daemon does (``dump`` of
a container of a pod with all fields that kubelet and a scheduler write) and appends it to a ledger that holds
as much as that of a full node.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pools_figures import full_node
from table import number, render

from proxy.backends.ledger import open_ledger
from proxy.executor.ledger_codec import dump
from proxy.model.workload import Pool
from tests.testkit.changed_copy import changed_copy

BAR_MS = 0.3
ROUNDS = 2000
HEAD = ("the ledger on a create's path", "p50", "p99", "bar", "largest", "after")


def measure() -> tuple[list[float], int, int]:
    """Return the milliseconds of each batch, and the size of the file at most and at the end, in bytes."""
    state = full_node()
    owner = next(c for c in state.containers.values() if c.placement.pool is Pool.OWN)
    took, largest = [], 0
    with tempfile.TemporaryDirectory() as directory:
        ledger, _ = open_ledger(Path(directory), "bench")
        ledger.write({f"c/{c.id}": dump(c) for c in state.containers.values()})
        ledger.write({f"p/{p.sandbox_id}": dump(p) for p in state.pods.values()})
        file = Path(directory) / "ledger.jsonl"
        for turn in range(ROUNDS):
            key, container = f"i/call-{turn}", changed_copy(owner, id=f"call-{turn}")
            begun = time.perf_counter()
            ledger.write({key: dump(container)})
            took.append((time.perf_counter() - begun) * 1000)
            ledger.write({key: None})
            largest = max(largest, file.stat().st_size)
        ledger.close()
        return took, largest, file.stat().st_size


def main() -> int:
    took, largest, last = measure()
    p50, p99 = statistics.median(took), sorted(took)[int(len(took) * 0.99)]
    missed = p50 > BAR_MS
    sizes = [f"{size / 1e6:.1f} MB" for size in (largest, last)]
    what = "1000 containers there, one more owner"
    bar = f"{BAR_MS} ms" + (" MISSED" if missed else "")
    print(render(HEAD, [[what, number(p50, "ms"), number(p99, "ms"), bar, *sizes]]))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

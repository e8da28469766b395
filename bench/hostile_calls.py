"""Measures how long each attack blocks the event loop: a section of ``make hostile-day``, or by itself

    .venv/bin/python bench/hostile_calls.py            half a minute
    .venv/bin/python bench/hostile_calls.py --pods 20  more pods of each kind

The honest day of ``tests/security`` is played on a node in memory, with pods of one kind between its steps
and a restart in the middle. The table shows the most CPU time that the loop's thread needed for one callback,
as the least of three plays (a garbage collection is not the attack's fault), and the longest message about
any pod.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hostile_pods import ATTACKS, attack
from table import number, render

from tests.security.tenants import CPUS, DAY, HOLD_MS, LARGEST_MESSAGE, Visits, play

PLAYS = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=6, help="pods of each kind (6)")
    parser.add_argument("--seed", type=int, default=1, help="of the attacks (1)")
    chosen = parser.parse_args()
    lines, missed = [], False
    for kind in ATTACKS:
        dice = random.Random(f"{kind} {chosen.seed}")
        visits: Visits = [(i % len(DAY), attack(kind, dice, CPUS), "") for i in range(chosen.pods)]
        played = [play(visits) for _ in range(PLAYS)]
        held, longest = min(p.held_ms for p in played), max(p.longest for p in played)
        missed |= held > HOLD_MS
        lines.append([kind, number(held, "ms"), f"{HOLD_MS:g} ms", str(longest), str(LARGEST_MESSAGE)])
    print(render(["attack", "loop held at most", "bar", "longest message, bytes", "bar"], lines))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

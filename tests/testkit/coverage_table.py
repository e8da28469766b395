"""Print how much of each package of ``proxy`` the tests run, from coverage's report (``make coverage``)."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path, PurePath
from typing import Any


def package_of(file: str) -> str:
    """Return the package of a file below ``proxy``: its first directory, or ``proxy`` itself."""
    parts = PurePath(file).parts
    below = parts[parts.index("proxy") + 1 :]
    return below[0] if len(below) > 1 else "proxy"


def table(report: dict[str, Any]) -> list[str]:
    """Return a line for each package, and one for all: lines of code, lines that no test ran, percentage."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file, found in report["files"].items():
        for name in (package_of(file), "all"):
            sums[name][0] += found["summary"]["num_statements"]
            sums[name][1] += found["summary"]["missing_lines"]
    order = sorted(sums, key=lambda name: (name == "all", name))
    lines = [f"{'package':<12} {'lines':>7} {'not run':>8} {'run':>7}"]
    for name in order:
        whole, missing = sums[name]
        share = 100 * (whole - missing) / whole if whole else 100.0
        lines.append(f"{name:<12} {whole:>7} {missing:>8} {share:>6.1f}%")
    return lines


if __name__ == "__main__":
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text()))))

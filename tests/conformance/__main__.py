"""``python -m tests.conformance PATH...``: check topoproxy against files of vectors.

Exit status: 0 all that was run passed, 1 something failed, 2 a file could not be used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.conformance import registry
from tests.conformance.runner import OWN, expand, run_file


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Check topoproxy against files of test vectors.",
        epilog=f"Schemas that can be run: {', '.join(registry.supported())}.",
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="*", type=Path, default=[OWN], help="file or directory"
    )
    files = expand(parser.parse_args(arguments).paths)
    reports = [run_file(path, files) for path in files]
    for report in reports:
        if not report.error:
            print(*report.lines(), sep="\n")
    errors = [report.error for report in reports if report.error]
    if not files:
        errors.append("cannot find any vectors: no *.json file in these directories")
    sys.stdout.flush()
    for error in errors:
        print(error, file=sys.stderr, flush=True)
    failed = sum(len(report.failures) for report in reports)
    if skipped := sum(report.skips.total() for report in reports):
        print(f"{skipped} skipped")
    print(f"{sum(report.passed for report in reports)} passed, {failed} failed")
    return 2 if errors else int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

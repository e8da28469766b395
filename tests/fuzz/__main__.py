"""``python -m tests.fuzz``: random sessions and random bodies, from a seed that is printed.

Exit status: 0 all held, 1 a property does not hold; then the seed, the round and the step are printed, and
the command that does that round again.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.fuzz import bodies, sessions
from tests.fuzz.outcome import FuzzError, run

FUZZERS = {"sessions": sessions.one, "bodies": bodies.one}
SLICE_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, for all together (60)")
    parser.add_argument("--seed", type=int, help="by default another one each time")
    parser.add_argument("--only", choices=FUZZERS, help="one of them")
    parser.add_argument("--round", type=int, help="that round alone")
    parser.add_argument("--forever", action="store_true", help="continue until something is found")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    names = [options.only] if options.only else list(FUZZERS)
    print(f"seed {seed}", flush=True)
    first = dict.fromkeys(names, options.round or 0)
    try:
        while True:
            for name in names:
                seconds = SLICE_S if options.forever else options.seconds / len(names)
                only = options.round is not None
                outcome = run(name, FUZZERS[name], seed, seconds, first=first[name], only=only)
                first[name] += outcome.rounds
                print(outcome, flush=True)
            if not options.forever or options.round is not None:
                return 0
    except FuzzError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

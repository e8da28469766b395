"""The command: simulate nodes from a seed, in a few processes, until enough events were delivered."""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.node import SimulatedNode
from tests.simulation.planted import PLANTED, planted

EVENTS, WORKERS = 1_000_000, 2
EPOCH_EVENTS = 20_000
"""Events of one node; then the next one begins, with a seed derived from the first."""


@dataclass
class SimulationOutcome:
    """What one process found."""

    events: int = 0
    nodes: int = 0
    daemon_starts: int = 0
    checks: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    trace: str = ""
    violation: str = ""
    seed: int = 0
    requested: int = 0
    recent: tuple[str, ...] = ()


def seed_of(seed: int, worker: int, epoch: int) -> int:
    """Return the seed of one node: the first has the seed itself, so that any node can be repeated alone."""
    if not worker and not epoch:
        return seed
    digest = hashlib.blake2b(f"{seed}/{worker}/{epoch}".encode(), digest_size=5).digest()
    return int.from_bytes(digest, "big")


def simulate(seed: int, events: int) -> SimulationOutcome:
    """Simulate one node."""
    outcome = SimulationOutcome(seed=seed, requested=events)
    node = SimulatedNode(seed)
    try:
        node.run(events)
    except AssertionError as error:
        outcome.violation = str(error) or repr(error)
    except Exception as error:
        import traceback

        outcome.violation = f"the simulation failed: {error!r}\n{traceback.format_exc()}"
    finally:
        node.close()
    outcome.events, outcome.nodes, outcome.daemon_starts = node.schedule.events, 1, node.daemon_starts
    outcome.checks = node.promises.checks
    outcome.kinds = Counter(node.schedule.by_kind)
    outcome.trace, outcome.recent = node.schedule.trace_hash, tuple(node.schedule.recent)
    return outcome


def simulate_nodes(
    seed: int, worker: int, events: int, epoch_events: int = EPOCH_EVENTS
) -> SimulationOutcome:
    """Simulate one node after the other, until enough events were delivered or a promise is broken."""
    gc.freeze()
    total, traces, epoch = SimulationOutcome(), hashlib.blake2b(digest_size=16), 0
    while total.events < events:
        outcome = simulate(seed_of(seed, worker, epoch), min(epoch_events, events - total.events))
        traces.update(outcome.trace.encode())
        total.events += outcome.events
        total.nodes += 1
        total.daemon_starts += outcome.daemon_starts
        total.checks += outcome.checks
        total.kinds += outcome.kinds
        epoch += 1
        if outcome.violation:
            total.violation, total.seed, total.recent = outcome.violation, outcome.seed, outcome.recent
            total.trace, total.requested = outcome.trace, outcome.requested
            return total
        print(f"worker {worker}: {total.events} events, {total.nodes} nodes", file=sys.stderr, flush=True)
    total.trace = traces.hexdigest()
    return total


def _job(job: tuple[int, int, int, int]) -> SimulationOutcome:
    return simulate_nodes(*job)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulate nodes.")
    parser.add_argument("--seed", type=int, default=None, help="the seed; the time if it is not given")
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument(
        "--node-events", type=int, default=EPOCH_EVENTS, help="events of one node, then the next"
    )
    parser.add_argument(
        "--plant", choices=sorted(PLANTED), default="", help="plant a fault, which must be found"
    )
    parser.add_argument("--trace", type=int, default=40, help="lines of the trace to print after a violation")
    return parser.parse_args(argv)


def main() -> None:
    """Run the command; exit code 1 if a promise is broken."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is part of a run
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    options = arguments()
    seed = options.seed if options.seed is not None else int(time.time())
    began = time.monotonic()
    with planted(options.plant):
        outcomes = _outcomes(options, seed)
    sys.exit(report(seed, outcomes, time.monotonic() - began, options))


def _outcomes(options: argparse.Namespace, seed: int) -> list[SimulationOutcome]:
    jobs = [
        (seed, number, options.events // options.workers, options.node_events)
        for number in range(options.workers)
    ]
    if options.workers == 1:
        return [simulate_nodes(*jobs[0])]
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        return pool.map(_job, jobs, chunksize=1)


def report(seed: int, outcomes: list[SimulationOutcome], seconds: float, options: argparse.Namespace) -> int:
    """Print what came out, and return the exit code."""
    kinds = sum((outcome.kinds for outcome in outcomes), Counter[str]())
    events = sum(outcome.events for outcome in outcomes)
    nodes, daemon_starts, checks = (
        sum(getattr(o, key) for o in outcomes) for key in ("nodes", "daemon_starts", "checks")
    )
    print(
        f"seed {seed}: {events} events on {nodes} nodes in {seconds:.0f} s"
        f" ({events / max(seconds, 0.001):.0f}/s),"
        f" {daemon_starts} starts of the daemon, {checks} cpusets checked"
    )
    print(", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    print(f"trace {' '.join(outcome.trace for outcome in outcomes)}")
    wrong = [outcome for outcome in outcomes if outcome.violation]
    for outcome in wrong:
        if options.trace:
            print("\n".join(outcome.recent[-options.trace :]))
        print(f"violation: {outcome.violation}")
        plant = f" PLANT={options.plant}" if options.plant else ""
        variables = f"SEED={outcome.seed} EVENTS={outcome.requested} WORKERS=1{plant}"
        print(f"repeat it: make simulate-faults {variables}")
    print(f"{len(wrong)} violations")
    return int(bool(wrong))

"""Implements ``topoproxy simulate``: reads machines and pods, makes trial placements, writes the output."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from proxy.cli.simulate_cluster import ClusterOptions, simulate_cluster
from proxy.config import Config, load
from proxy.model.errors import UsageError
from proxy.simulate.cluster import PodOutcome
from proxy.simulate.data import page
from proxy.simulate.machines import (
    NamedMachine,
    check_plugins,
    copies,
    described_machines,
    load_plugins,
    sysfs_machine,
)
from proxy.simulate.manifests import Pods, load_pods
from proxy.simulate.simulation import Simulation, SimulationRules, simulate, simulated_nodes_of
from proxy.simulate.summary import Findings, find, too_small
from proxy.simulate.text import compare_lines, differences, differences_data, explain_lines, report

_BAR = 30
"""Characters of the progress bar."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of the command, by their names."""

    pods: tuple[str, ...]
    machines: tuple[str, ...]
    sysfs_root: Path | None
    nodes: int
    devices: Path | None
    file: Path | None
    other: Path | None
    replicas: int
    fill: bool
    retry: bool
    anywhere: bool
    max_pods: int
    explain: tuple[str, ...]
    as_json: bool
    verbose: bool
    progress: bool | None


def simulate_on_machines(options: SimulateOptions, fleet: ClusterOptions | None) -> bool:
    """Simulate pods, and print the result.

    Args:
        options: The options of the command.
        fleet: The options of ``--cluster``; None without it.

    Returns:
        Whether all pods have been placed.

    Raises:
        InputError, ConfigError, UsageError: A file or an option is invalid.
    """
    names_machines = bool(options.machines or options.sysfs_root)
    machines = [] if fleet is not None and not names_machines else _machines(options)
    plugins = load_plugins(options.devices) if options.devices else {}
    if options.devices:
        check_plugins(plugins, machines, options.devices)
    configs = [load(options.file), *([load(options.other)] if options.other else [])]
    if fleet is not None:
        return simulate_cluster(
            options.pods,
            simulated_nodes_of(configs[0], machines, SimulationRules(plugins, max_pods=options.max_pods)),
            fleet,
            replicas=options.replicas,
            anywhere=options.anywhere,
            counter=functools.partial(_counter, options.progress),
            as_json=options.as_json,
            verbose=options.verbose,
        )
    names = [machine.name for machine in machines]
    pods = load_pods(options.pods, names, options.replicas, bound=not options.anywhere)
    explained = frozenset(_pods_to_explain(options.explain, pods))
    rules = SimulationRules(plugins, options.fill, options.retry, options.max_pods, explained)
    simulated_nodes = [simulated_nodes_of(config, machines, rules) for config in configs]
    with _counter(options.progress, len(pods.simulated_pods) * len(configs)) as step:
        simulations = [
            simulate(config, of_config, pods.simulated_pods, rules, step)
            for config, of_config in zip(configs, simulated_nodes, strict=True)
        ]
    findings = [find(simulation) for simulation in simulations]
    too_small_for = (note for simulation in simulations for note in too_small(simulation))
    notes = list(dict.fromkeys([*pods.notes, *too_small_for]))
    if options.as_json:
        click.echo(json.dumps(_data(simulations, findings, notes), indent=1, allow_nan=False))
    else:
        click.echo("\n".join(_text(simulations, findings, notes, rules.explain, verbose=options.verbose)))
    outcomes = (result.outcome for simulation in simulations for result in simulation.results)
    return all(outcome is PodOutcome.PLACED for outcome in outcomes)


def _machines(options: SimulateOptions) -> list[NamedMachine]:
    files, root, nodes = options.machines, options.sysfs_root, options.nodes
    if files and root:
        raise UsageError("cannot use --machine and --sysfs-root together: both name the machine")
    if files:
        return copies(described_machines(files), nodes)
    config = Config() if root else load(options.file)
    return copies([sysfs_machine(root or config.sysfs_root, None if root else config.procfs_root)], nodes)


def _pods_to_explain(queries: Sequence[str], pods: Pods) -> Iterator[str]:
    """Find the pods to explain.

    Raises:
        UsageError: There is no such pod.
    """
    refs = {simulated_pod.ref for simulated_pod in pods.simulated_pods} if queries else set()
    for query in queries:
        ref = query if "/" in query else f"default/{query}"
        if ref not in refs:
            import difflib

            close = difflib.get_close_matches(ref, sorted(refs), n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise UsageError(f"cannot explain {query}: there is no pod {ref}{meant}")
        yield ref


@contextmanager
def _counter(wanted: bool | None, total: int) -> Iterator[Callable[[], None]]:
    """Return a function that counts pods on standard error, a few times a second, or does nothing."""
    show = sys.stderr.isatty() if wanted is None else wanted
    done, last, began = 0, 0.0, time.monotonic()

    def step() -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if show and (now - last > 0.2 or done == total):
            last = now
            left = (now - began) / done * (total - done)
            bar = "#" * (_BAR * done // total)
            click.echo(f"\r[{bar:.<{_BAR}}] {done} of {total} pods, {left:.0f} s left ", err=True, nl=False)

    yield step
    if show:
        click.echo(f"\r{f'{total} pods in {time.monotonic() - began:.1f} s':<{_BAR + 40}}", err=True)


def _data(
    simulations: Sequence[Simulation], findings: Sequence[Findings], notes: Sequence[str]
) -> dict[str, object]:
    pages = [page(simulation, found, notes) for simulation, found in zip(simulations, findings, strict=True)]
    if len(pages) == 1:
        return pages[0]
    changed = differences(simulations[0], findings[0], simulations[1], findings[1])
    return {
        "schema": pages[0]["schema"],
        "a": pages[0],
        "b": pages[1],
        "differences": differences_data(changed),
    }


def _text(
    simulations: Sequence[Simulation],
    findings: Sequence[Findings],
    notes: Sequence[str],
    explain: frozenset[str],
    *,
    verbose: bool,
) -> list[str]:
    if len(simulations) == 2:
        lines = compare_lines(
            simulations[0], findings[0], simulations[1], findings[1], notes, verbose=verbose
        )
    else:
        lines = report(simulations[0], findings[0], notes, verbose=verbose)
    width = shutil.get_terminal_size((100, 24)).columns
    for name, simulation in zip("AB", simulations, strict=False):
        for result in simulation.results:
            if result.simulated_pod.ref in explain:
                title = f"{name}: " if len(simulations) > 1 else ""
                first, *rest = explain_lines(result, width)
                lines += ["", f"{title}{first}", *rest]
    return lines

"""``topoproxy simulate``: what would be placed where, without a node."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from proxy.cli.settings import config_option
from proxy.cli.simulate_cluster import (
    ClusterOptions,
    cluster_options,
    refuse_cluster_options,
    refuse_other_options,
    simulate_cluster,
)
from proxy.config import Config, load
from proxy.model.errors import UsageError
from proxy.simulate.cluster import Fate
from proxy.simulate.compare import compare_lines, differences, differences_data
from proxy.simulate.data import page
from proxy.simulate.hosts import MAX_PODS
from proxy.simulate.machines import Named, copies, described_machines, sysfs_machine
from proxy.simulate.manifests import Pods, load_pods
from proxy.simulate.plugins import check_plugins, load_plugins
from proxy.simulate.rehearsal import Rehearsal, Rules, hosts_of, rehearse
from proxy.simulate.sizes import too_small
from proxy.simulate.summary import Findings, find
from proxy.simulate.text import explain_lines, report

FILE = click.Path(path_type=Path)
_REFUSED = 1
_BAR = 30
"""Characters of the progress bar."""


@click.command()
@click.argument("pods", nargs=-1, required=True, metavar="PODS...")
@click.option(
    "--machine",
    "machines",
    multiple=True,
    metavar="[NAME=]FILE",
    help="A machine as topoproxy topology --json prints it; may be given again.",
)
@click.option(
    "--sysfs-root", type=FILE, help="A machine as a sysfs tree. Without either: this machine (/sys)."
)
@click.option(
    "--nodes", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Copies of each machine."
)
@click.option("--devices", type=FILE, metavar="FILE", help="Devices of every machine, as plugins list them.")
@config_option
@click.option("--compare", "other", type=FILE, metavar="OTHER", help="A second configuration, side by side.")
@click.option(
    "--replicas", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="Copies of each pod."
)
@click.option("--fill", is_flag=True, help="Choose the machine with the least free CPU, not the most.")
@click.option("--retry", is_flag=True, help="Let a refused pod try the next machine.")
@click.option("--anywhere", is_flag=True, help="Do not follow nodeName and host name selectors.")
@click.option(
    "--max-pods",
    type=click.IntRange(0, 1_000_000),
    default=MAX_PODS,
    show_default=True,
    help="Most pods on one machine, as kubelet's maxPods; 0: no limit.",
)
@click.option(
    "--explain", multiple=True, metavar="POD", help="Show why a pod is where it is; may be given again."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as data.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Show all machines, and all pods that were not placed well."
)
@click.option(
    "--progress/--no-progress", default=None, help="Count on standard error; default: on a terminal."
)
@click.option("--fail-on-refused", is_flag=True, help="End with 1 if a pod was refused or is unschedulable.")
@cluster_options
def simulate(
    pods: tuple[str, ...],
    machines: tuple[str, ...],
    sysfs_root: Path | None,
    nodes: int,
    devices: Path | None,
    file: Path | None,
    other: Path | None,
    replicas: int,
    fill: bool,
    retry: bool,
    anywhere: bool,
    max_pods: int,
    explain: tuple[str, ...],
    as_json: bool,
    verbose: bool,
    progress: bool | None,
    fail_on_refused: bool,
    cluster: bool,
    **fleet: Any,
) -> None:
    """Rehearse pods on machines: what would be placed where, and what refused.

    Nothing is needed for it: no cluster, no node, no root. The same code decides as in topoproxy serve.

    PODS are manifests: files, directories, or - for standard input, YAML or JSON, with Pods, lists,
    Deployments, StatefulSets, DaemonSets, ReplicaSets or Jobs. They come one after the other, first to a
    scheduler that counts requests, then to the machine that it chose, which knows NUMA nodes and may refuse.

    \b
    Try it: what does this machine do with five pods of 2 CPUs each?
      topoproxy topology --json > here.json
      echo '{apiVersion: v1, kind: Pod, metadata: {name: job}, spec: {containers:
        [{name: main, resources: {limits: {cpu: 2, memory: 1Gi}}}]}}' > pod.yaml
      echo 'cpuManagerPolicy: static' > static.yaml
      topoproxy simulate pod.yaml --replicas 5 --machine here.json \\
        --config static.yaml --explain job-1

    \b
    Two configurations, the pods of a live cluster, ten machines of a kind:
      kubectl get pods -A -o yaml |
        topoproxy simulate - --anywhere --machine big.json --nodes 10 \\
          --config old.yaml --compare new.yaml

    \b
    A fleet, and what the scheduler extender makes of it beside the stock scheduler alone:
      kubectl get nodes,pods,numatopologies -A -o yaml | topoproxy simulate --cluster -

    With --cluster, PODS may hold nodes too, and descriptions of fleets. See docs/simulate-cluster.md.

    Ends with 0 whatever the outcome for the pods (but see --fail-on-refused), with 65 where a manifest, a
    machine or a device file is not what it should be, with 78 where a configuration is refused. See
    docs/simulate.md.
    """  # noqa: D301 - click wants the real backspace
    asked = ClusterOptions(**fleet)
    if cluster:
        refuse_other_options({"--compare": other, "--explain": explain, "--fill": fill, "--retry": retry})
    else:
        refuse_cluster_options(asked)
    named = [] if cluster and not (machines or sysfs_root) else _machines(machines, sysfs_root, nodes, file)
    plugins = load_plugins(devices) if devices else {}
    if devices:
        check_plugins(plugins, named, devices)
    configs = [load(file), *([load(other)] if other else [])]
    if cluster:
        placed = simulate_cluster(
            pods,
            hosts_of(configs[0], named, Rules(plugins, max_pods=max_pods)),
            asked,
            replicas=replicas,
            anywhere=anywhere,
            counter=functools.partial(_counter, progress),
            as_json=as_json,
            verbose=verbose,
        )
        if fail_on_refused and not placed:
            click.get_current_context().exit(_REFUSED)
        return
    reported = load_pods(pods, [machine.name for machine in named], replicas, bound=not anywhere)
    rules = Rules(plugins, fill, retry, max_pods, frozenset(_wanted(explain, reported)))
    hosts = [hosts_of(config, named, rules) for config in configs]
    with _counter(progress, len(reported.guests) * len(configs)) as step:
        played = [
            rehearse(config, some, reported.guests, rules, step)
            for config, some in zip(configs, hosts, strict=True)
        ]
    found = [find(rehearsal) for rehearsal in played]
    notes = list(dict.fromkeys([*reported.notes, *(note for each in played for note in too_small(each))]))
    if as_json:
        click.echo(json.dumps(_data(played, found, notes), indent=1))
    else:
        click.echo("\n".join(_words(played, found, notes, rules.explain, verbose=verbose)))
    if fail_on_refused and any(result.fate is not Fate.PLACED for each in played for result in each.results):
        click.get_current_context().exit(_REFUSED)


def _machines(words: Sequence[str], root: Path | None, nodes: int, file: Path | None) -> list[Named]:
    if words and root:
        raise UsageError("cannot use --machine and --sysfs-root together: which machine is meant?")
    if words:
        return copies(described_machines(words), nodes)
    config = Config() if root else load(file)
    return copies([sysfs_machine(root or config.sysfs_root, None if root else config.procfs_root)], nodes)


def _wanted(words: Sequence[str], reported: Pods) -> Iterator[str]:
    """Find the pods that are to be explained.

    Raises:
        UsageError: There is no such pod.
    """
    refs = {guest.ref for guest in reported.guests} if words else set()
    for word in words:
        ref = word if "/" in word else f"default/{word}"
        if ref not in refs:
            import difflib

            close = difflib.get_close_matches(ref, sorted(refs), n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise UsageError(f"cannot explain {word}: there is no pod {ref}{meant}")
        yield ref


@contextmanager
def _counter(wanted: bool | None, total: int) -> Iterator[Callable[[], None]]:
    """Return what counts the pods on standard error, a few times a second; or nothing."""
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


def _data(played: Sequence[Rehearsal], found: Sequence[Findings], notes: Sequence[str]) -> dict[str, object]:
    pages = [page(one, its, notes) for one, its in zip(played, found, strict=True)]
    if len(pages) == 1:
        return pages[0]
    changed = differences(played[0], found[0], played[1], found[1])
    return {
        "schema": pages[0]["schema"],
        "a": pages[0],
        "b": pages[1],
        "differences": differences_data(changed),
    }


def _words(
    played: Sequence[Rehearsal],
    found: Sequence[Findings],
    notes: Sequence[str],
    explain: frozenset[str],
    *,
    verbose: bool,
) -> list[str]:
    if len(played) == 2:
        lines = compare_lines(played[0], found[0], played[1], found[1], notes, verbose=verbose)
    else:
        lines = report(played[0], found[0], notes, verbose=verbose)
    width = shutil.get_terminal_size((100, 24)).columns
    for name, rehearsal in zip("AB", played, strict=False):
        for result in rehearsal.results:
            if result.guest.ref in explain:
                title = f"{name}: " if len(played) > 1 else ""
                first, *rest = explain_lines(result, width)
                lines += ["", f"{title}{first}", *rest]
    return lines

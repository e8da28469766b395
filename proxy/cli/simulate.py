"""``topoproxy simulate``: shows where pods would be placed, without a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from proxy.cli.settings import PATH, config_option
from proxy.cli.simulate_cluster import (
    ClusterOptions,
    cluster_options,
    refuse_cluster_options,
    refuse_other_options,
)
from proxy.simulate import MAX_PODS

_REFUSED = 1


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
    "--sysfs-root", type=PATH, help="A machine as a sysfs tree. Without either: this machine (/sys)."
)
@click.option(
    "--nodes", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Copies of each machine."
)
@click.option(
    "--devices", type=PATH, metavar="FILE", help="Devices of every machine, as device plugins list them."
)
@config_option
@click.option("--compare", "other", type=PATH, metavar="OTHER", help="A second configuration, side by side.")
@click.option(
    "--replicas", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="Copies of each pod."
)
@click.option("--fill", is_flag=True, help="Choose the machine with the least free CPU, not the most.")
@click.option("--retry", is_flag=True, help="Let a rejected pod try the next machine.")
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
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Show all machines, and all pods that were not placed well."
)
@click.option(
    "--progress/--no-progress",
    default=None,
    help="Show the progress on standard error; default: on a terminal.",
)
@click.option("--fail-on-refused", is_flag=True, help="End with 1 if a pod was rejected or is unschedulable.")
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
    """Simulate pods on machines: where each would be placed, and which would be rejected.

    This needs no cluster, no node and no root. Decisions are made by the code of topoproxy serve.

    PODS are manifests: files, directories, or - for standard input, YAML or JSON, with Pods, lists,
    Deployments, StatefulSets, DaemonSets, ReplicaSets or Jobs. They are placed one after the other: first by
    a scheduler that counts requests, then by topoproxy on that machine, which considers NUMA nodes and may
    reject them.

    \b
    Try it: what does this machine do with two pods of 1 CPU each?
      topoproxy topology --json > here.json
      echo '{apiVersion: v1, kind: Pod, metadata: {name: job}, spec: {containers:
        [{name: main, resources: {limits: {cpu: 1, memory: 100Mi}}}]}}' > pod.yaml
      echo 'cpuManagerPolicy: static' > static.yaml
      topoproxy simulate pod.yaml --replicas 2 --machine here.json \\
        --config static.yaml --explain job-1

    \b
    Two configurations, the pods of a live cluster, ten machines of a kind:
      kubectl get pods -A -o yaml |
        topoproxy simulate - --anywhere --machine big.json --nodes 10 \\
          --config old.yaml --compare new.yaml

    \b
    A cluster: the stock scheduler alone, compared with the scheduler extender:
      kubectl get nodes,pods,numatopologies -A -o yaml | topoproxy simulate --cluster -

    With --cluster, PODS may also be nodes and descriptions of fleets: docs/simulate-cluster.md.

    Ends with 0 whatever the outcome for the pods (but see --fail-on-refused), with 65 if a manifest, a
    machine or a device file is invalid, with 78 if a configuration is refused. See docs/simulate.md.
    """  # noqa: D301 - click wants the real backspace
    requested = ClusterOptions(**fleet)
    if cluster:
        refuse_other_options({"--compare": other, "--explain": explain, "--fill": fill, "--retry": retry})
    else:
        refuse_cluster_options(requested)
    from proxy.cli.simulate_pods import SimulateOptions, simulate_on_machines  # only here: --help is quick

    options = SimulateOptions(
        pods, machines, sysfs_root, nodes, devices, file, other, replicas, fill, retry, anywhere, max_pods,
        explain, as_json, verbose, progress,
    )  # fmt: skip
    placed = simulate_on_machines(options, requested if cluster else None)
    if fail_on_refused and not placed:
        click.get_current_context().exit(_REFUSED)

"""``topoproxy agent``: runs the process between the daemon's admin socket and the API server."""

from __future__ import annotations

from pathlib import Path

import click

from proxy.cli.settings import PATH, config_option, missing_library_error, read_config


@click.command()
@config_option
@click.option(
    "--admin",
    metavar="unix://SOCKET",
    help="The daemon's admin socket. Replaces adminSocket.",
)
@click.option("--node", metavar="NAME", help="The name of the Node object. Replaces cluster.node.")
@click.option(
    "--kubeconfig",
    type=PATH,
    metavar="FILE",
    help="The credentials for the API server. Replaces cluster.kubeconfig.",
)
def agent(file: Path | None, admin: str | None, node: str | None, kubeconfig: Path | None) -> int:
    """Publish the state of this node in the cluster, until SIGTERM.

    The agent follows the daemon over its admin socket, and writes objects for schedulers (Numatopology,
    NodeResourceTopology), annotations of pods, Events, and a condition of the node. Each is usually written
    within a second of a change. The daemon never waits for the agent: without it, or without the API server,
    pods are still placed.

    The agent needs the libraries of requirements-cluster.lock, which the container image has. docs/cluster.md
    lists the permissions.
    """
    from proxy.config import override

    try:
        from proxy.agent.process import run
    except ImportError as error:
        raise missing_library_error("the agent", error) from error

    options = {"cluster.node": ("--node", node), "cluster.kubeconfig": ("--kubeconfig", kubeconfig)}
    overrides = {key: (option, str(value)) for key, (option, value) in options.items() if value is not None}
    return run(override(read_config(file, {"admin": admin}), overrides))

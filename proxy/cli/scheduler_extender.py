"""``topoproxy scheduler-extender``: runs the extender that kube-scheduler calls before it binds a pod."""

from __future__ import annotations

from pathlib import Path

import click

from proxy.cli.settings import PATH, missing_library_error
from proxy.model.errors import UsageError

STRATEGIES = (
    "fewest-numa-nodes", "least-allocated", "most-allocated", "balanced-allocation",
    "numa-least-allocated", "numa-most-allocated",
)  # fmt: skip
MOST_PORT = 65535


@click.command()
@click.option(
    "--listen",
    default=":8443",
    show_default=True,
    metavar="[HOST]:PORT",
    help="Where kube-scheduler connects.",
)
@click.option("--tls-cert", default="", metavar="FILE", help="The server's certificate, PEM.")
@click.option("--tls-key", default="", metavar="FILE", help="The key of that certificate, PEM.")
@click.option(
    "--client-ca",
    default="",
    metavar="FILE",
    help="The authority (CA) that signed kube-scheduler's certificate, PEM.",
)
@click.option("--plain-http", is_flag=True, help="Serve without TLS, on a loopback address only.")
@click.option(
    "--kubeconfig",
    type=PATH,
    metavar="FILE",
    help="The credentials for the API server; without it those of the pod, or otherwise KUBECONFIG.",
)
@click.option(
    "--lease",
    default="topoproxy-system/topoproxy-scheduler-extender",
    show_default=True,
    metavar="NAMESPACE/NAME",
    help="The Lease object: of several replicas the one that holds it answers.",
)
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    default=STRATEGIES[0],
    show_default=True,
    help="How the nodes that fit are ranked.",
)
@click.option(
    "--log-level",
    type=click.Choice(("debug", "info", "warning", "error")),
    default="info",
    show_default=True,
    help="The lowest level that is logged.",
)
@click.option(
    "--log-format",
    type=click.Choice(("text", "klog", "json")),
    default="text",
    show_default=True,
    help="The format of the log.",
)
def scheduler_extender(
    listen: str,
    tls_cert: str,
    tls_key: str,
    client_ca: str,
    plain_http: bool,
    kubeconfig: Path | None,
    lease: str,
    strategy: str,
    log_level: str,
    log_format: str,
) -> int:
    """Keep kube-scheduler from sending pods to nodes that must reject them, until SIGTERM.

    The stock kube-scheduler calls the extender over HTTPS to learn which nodes would admit a pod, and lets it
    bind the pod. The extender decides with the same engine as the nodes. It reads the nodes from the objects
    that the agents of topoproxy, Volcano, NFD (Node Feature Discovery) or Koordinator publish.

    The extender needs the libraries of requirements-cluster.lock, which the container image has.
    docs/scheduler.md describes the configuration of kube-scheduler and the permissions.
    """
    host, colon, port = listen.rpartition(":")
    namespace, _, name = lease.partition("/")
    if not colon or not port.isdecimal() or int(port) > MOST_PORT:
        raise UsageError(
            f"cannot start the extender: --listen must be [HOST]:PORT, with a port up to {MOST_PORT}:"
            f" {listen}"
        )
    if not namespace or not name:
        raise UsageError(f"cannot start the extender: --lease must be NAMESPACE/NAME: {lease}")
    if plain_http:
        if host not in ("127.0.0.1", "[::1]", "localhost"):
            raise UsageError(
                f"cannot start the extender: --plain-http needs a loopback address in --listen, not {listen}"
            )
        if tls_cert or tls_key or client_ca:
            raise UsageError(
                "cannot start the extender: --tls-cert, --tls-key and --client-ca have no effect"
                " with --plain-http"
            )
    elif not (tls_cert and tls_key and client_ca):
        raise UsageError(
            "cannot start the extender: it needs --tls-cert, --tls-key and --client-ca"
            " (or --plain-http on a loopback address)"
        )
    try:
        from proxy.extender.process import ExtenderOptions, run
    except ImportError as error:
        raise missing_library_error("the extender", error) from error
    from proxy.extender.tls_files import TlsFiles
    from proxy.scheduler.scores import Strategy

    tls = None if plain_http else TlsFiles(tls_cert, tls_key, client_ca)
    options = ExtenderOptions(
        host.strip("[]"), int(port), tls, kubeconfig, (namespace, name), Strategy(strategy), log_level,
        log_format,
    )  # fmt: skip
    return run(options)

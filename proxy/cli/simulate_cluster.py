"""``topoproxy simulate --cluster``: compares kube-scheduler with and without the extender."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from proxy.cli.settings import PATH, FiniteRange
from proxy.model.errors import CannotCreateError, UsageError

if TYPE_CHECKING:
    from proxy.simulate.fleet.fleet_simulation import FleetSettings, FleetSimulation
    from proxy.simulate.nodes import SimulatedNode

Command = TypeVar("Command", bound=Callable[..., Any])
Counter = Callable[[int], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options of the command line that concern a fleet; None for one that is not used.

    Attributes:
        seed, arrival, rate, lifetime, percentage_of_nodes, svg: The values of the options of these names.
    """

    seed: int | None = None
    arrival: str | None = None
    rate: float | None = None
    lifetime: float | None = None
    percentage_of_nodes: int | None = None
    svg: Path | None = None

    def named(self) -> list[str]:
        """Return the names of the options that are used."""
        names = ("seed", "arrival", "rate", "lifetime", "percentage_of_nodes", "svg")
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]


def cluster_options(command: Command) -> Command:
    """Add the options of ``--cluster``."""
    for option in reversed(
        (
            click.option(
                "--cluster",
                is_flag=True,
                help="Compare kube-scheduler alone and with the scheduler extender on a fleet.",
            ),
            click.option(
                "--seed",
                type=int,
                metavar="N",
                help="--cluster: the seed of all random numbers.  [default: 1]",
            ),
            click.option(
                "--arrival",
                type=click.Choice(["burst", "poisson"]),
                help="--cluster: all pods at once, or one after the other.  [default: burst]",
            ),
            click.option(
                "--rate",
                type=FiniteRange(1e-6, 1e6),
                metavar="N",
                help="--arrival poisson: pods that arrive in a second, on average.  [default: 10]",
            ),
            click.option(
                "--lifetime",
                type=FiniteRange(0, 1e9),
                metavar="S",
                help="--cluster: seconds for which a pod stays, on average; 0: to the end.  [default: 0]",
            ),
            click.option(
                "--percentage-of-nodes",
                type=click.IntRange(0, 100),
                metavar="N",
                help="--cluster: percentageOfNodesToScore.  [default: 0; with the extender 100]",
            ),
            click.option(
                "--svg",
                type=PATH,
                metavar="FILE",
                help="--cluster: write a picture of both runs.",
            ),
        )
    ):
        command = option(command)
    return command


def simulate_cluster(
    paths: Sequence[str],
    simulated_nodes: Sequence[SimulatedNode],
    options: ClusterOptions,
    *,
    replicas: int,
    anywhere: bool,
    counter: Counter,
    as_json: bool,
    verbose: bool,
) -> bool:
    """Simulate a fleet, and print the result.

    Args:
        paths: Files with nodes, pods and fleets.
        simulated_nodes: The nodes that the command line describes.
        options: The options of ``--cluster``.
        replicas: Copies of each recorded pod.
        anywhere: Whether recorded pods may be placed on other nodes than those where they run.
        counter: Counts the pods of both runs.
        as_json: Print data.
        verbose: List the pods in the data.

    Returns:
        Whether all pods have been placed by the extended scheduler.

    Raises:
        InputError: A file is invalid.
        CannotCreateError: The picture cannot be written.
    """
    from proxy.simulate.fleet.figures import figures_of, fleet_lines, fleet_page, time_lines
    from proxy.simulate.fleet.fleet_simulation import fleet_of, simulate_fleet
    from proxy.simulate.manifests import read_documents

    settings = _settings(options, replicas, anywhere=anywhere)
    if options.svg:
        _check_writable(options.svg)
    fleet = fleet_of(read_documents(paths), simulated_nodes, settings)
    with counter(2 * len(fleet.coming)) as step:
        done = simulate_fleet(fleet, settings, step)
    if as_json:
        click.echo(json.dumps(fleet_page(done, each_pod=verbose), indent=1, allow_nan=False))
    else:
        click.echo("\n".join([*fleet_lines(done), *(time_lines(done) if verbose else ())]))
    if options.svg:
        _draw(done, options.svg)
    last = figures_of(done.runs[-1])
    return last.placed == last.pods


def refuse_cluster_options(options: ClusterOptions) -> None:
    """Refuse the options of ``--cluster`` without it.

    Raises:
        UsageError: One of them is used.
    """
    if names := options.named():
        raise UsageError(f"cannot use {names[0]} without --cluster")


def refuse_other_options(others: Mapping[str, object]) -> None:
    """Refuse options that have no meaning with ``--cluster``.

    Args:
        others: Their values, by name.

    Raises:
        UsageError: One of them is used.
    """
    for name, value in others.items():
        if value:
            raise UsageError(f"cannot use {name} with --cluster")


def _settings(options: ClusterOptions, replicas: int, *, anywhere: bool) -> FleetSettings:
    from proxy.simulate.fleet.fleet_simulation import Arrival, ArrivalPattern, FleetSettings

    arrival = Arrival(options.arrival or Arrival.BURST)
    if options.rate is not None and arrival is not Arrival.POISSON:
        raise UsageError("cannot use --rate without --arrival poisson")
    return FleetSettings(
        ArrivalPattern(arrival, options.rate or 10.0, options.lifetime or 0.0),
        1 if options.seed is None else options.seed,
        options.percentage_of_nodes or 0,
        100 if options.percentage_of_nodes is None else options.percentage_of_nodes,
        replicas=replicas,
        anywhere=anywhere,
    )


def _check_writable(path: Path) -> None:
    """Check before a long simulation that its picture can be written.

    Raises:
        CannotCreateError: It cannot be written.
    """
    try:
        existing = path if path.exists() else path.parent
        if path.is_dir():
            problem = errno.EISDIR
        elif not existing.exists():
            problem = errno.ENOENT
        elif not os.access(existing, os.W_OK):
            problem = errno.EACCES
        else:
            return
    except OSError as error:
        raise CannotCreateError(f"cannot write the picture {path}: {error.strerror}") from error
    raise CannotCreateError(f"cannot write the picture {path}: {os.strerror(problem)}")


def _draw(done: FleetSimulation, path: Path) -> None:
    from proxy.simulate.fleet.figures import svg_of

    try:
        path.write_text(svg_of(done.runs, done.fleet.cpus))
    except OSError as error:
        raise CannotCreateError(f"cannot write the picture {path}: {error.strerror}") from error

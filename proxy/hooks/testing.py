'''Tests of hooks: load a file, make events, call it, check the outcome.

A hook is called by the engine that the daemon has, so its deadline, the checks of its answer, conflicts with
other hooks and its vetoes are the real ones. A test needs no daemon, no root and no cgroup, and waits no
longer than the hook's own timeout. A whole test::

    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "50-pinned.py"
    >>> _ = path.write_text("""
    ... from proxy.hooks.api import Adjustment
    ...
    ... API_VERSION = 1
    ...
    ... def pre_create_container(event):
    ...     if event.pod.labels.get("app") == "db" and event.decision.own:
    ...         return Adjustment(envs={"PINNED": str(event.decision.own)})
    ... """)

    >>> from proxy.hooks import testing
    >>> hook = testing.load(path)
    >>> event = testing.event(
    ...     "pre_create_container",
    ...     pod=testing.pod(labels={"app": "db"}),
    ...     decision=testing.decision("own", cpus="2-3"),
    ... )
    >>> outcome = testing.run(hook, event)
    >>> outcome.adjustment.envs
    {'PINNED': '2-3'}
    >>> dict(outcome.owners)
    {'envs[PINNED]': '50-pinned'}

    >>> sharing = testing.event("pre_create_container", decision=testing.decision("shared"))
    >>> testing.run(hook, sharing).adjustment == testing.NOTHING
    True

A hook that fails ends the test with the message of its error::

    >>> _ = path.write_text("""
    ... API_VERSION = 1
    ...
    ... def pre_create_container(event):
    ...     return {"PINNED": "2-3"}
    ... """)
    >>> testing.run(testing.load(path), event)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: hook 50-pinned: cannot use its answer at pre_create_container: it must be an Adjustment...

``topoproxy hooks run`` does the same with events in JSON files.
'''

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.hooks import HooksConfig, HookSettings
from proxy.hooks import samples
from proxy.hooks.answers import CLEAR, LEAVE, NOTHING, Adjustment, Update, Veto
from proxy.hooks.engine.engine import HookEngine, least_seconds
from proxy.hooks.events import POINTS, Configure, Point
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Running
from proxy.hooks.hook import Hook, Outcome
from proxy.hooks.loader.loading import Loaded, load_file
from proxy.hooks.readonly import read_only
from proxy.model.errors import HookError, InputError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.telemetry.port import silent
from proxy.topology.regular_machine import regular_machine

__all__ = [
    "CLEAR",
    "LEAVE",
    "NOTHING",
    "Adjustment",
    "Loaded",
    "Outcome",
    "Update",
    "Veto",
    "container",
    "decision",
    "event",
    "load",
    "machine",
    "pod",
    "run",
    "running",
]

SPARE_S = 30.0
"""On a slow machine a call may take this much longer than the sum of the hooks' own timeouts."""
Hooks: TypeAlias = Loaded | Hook | Sequence[Loaded | Hook]


def load(path: Path | str, config: Mapping[str, Any] | None = None) -> Loaded:
    """Load a hook file as the daemon does, whatever user owns it, and configure it.

    Args:
        path: The file; the hook gets its name.
        config: The content of ``hooks.settings.NAME.config``.

    Raises:
        HookError: It is not a hook, or refuses this configuration; the text is that of the daemon's log.
    """
    path = Path(path)
    settings = HookSettings(config=None if config is None else _fixed(config))
    loaded = load_file(path, HooksConfig(settings=FrozenMapping({path.stem: settings})), trusted=False)
    _, failure = _call_in_thread([loaded.hook], Configure(loaded.settings, loaded.hook.name))
    if failure:
        raise HookError(failure)
    return loaded


def run(hooks: Hooks, event: Point, *, allow_failures: bool = False) -> Outcome:
    """Call hooks with an event, in order of their names, and then the validating ones.

    Args:
        hooks: One or several.
        event: The event that they receive.
        allow_failures: If hooks fail, return the outcome by their policy, as the daemon would.

    Raises:
        AssertionError: A hook failed: it raised, was too late, or its answer is invalid.
    """
    several: Sequence[Loaded | Hook] = [hooks] if isinstance(hooks, Loaded | Hook) else hooks
    outcome, failure = _call_in_thread(
        [hook.hook if isinstance(hook, Loaded) else hook for hook in several], event
    )
    if failure and not allow_failures:
        raise AssertionError(failure)
    return outcome


def event(point: str, **fields: Any) -> Any:
    """Make an event of a point: the immutable sample, with the given fields replaced.

    Args:
        point: The name of its handlers: ``pre_create_container``.
        fields: Fields of the event: ``pod=pod(...)``, ``container=container(...)``, ``decision=...``.

    Raises:
        InputError: There is no such point.
        TypeError: It has no such field.
    """
    if point not in POINTS:
        raise InputError(f"cannot make an event of {point!r}: no such hook point")
    return read_only(dataclasses.replace(samples.sample(point), **fields))


def pod(**fields: Any) -> PodFacts:
    """Make a pod of class LSR without labels and annotations, with the given fields replaced."""
    return dataclasses.replace(samples.POD, **{"labels": {}, "annotations": {}, **fields})


def container(**fields: Any) -> ContainerFacts:
    """Make a container that is about to be created, with the given fields replaced.

    ``resources`` may be a mapping of the fields that differ from the sample's. Set an ``id`` for a container
    that exists.
    """
    resources = fields.get("resources")
    if isinstance(resources, Mapping):
        fields["resources"] = dataclasses.replace(samples.CONTAINER.resources, **resources)
    if fields.get("id"):
        fields.setdefault("phase", "running")
    plain: dict[str, Any] = {
        "envs": {},
        "annotations": {},
        "labels": {},
        "mounts": (),
        "devices": (),
        "command": (),
        "args": (),
    }
    return dataclasses.replace(samples.CONTAINER, **{**plain, **fields})


def decision(
    pool: str = "own", cpus: str | CpuSet | None = None, mems: str | Mask | None = None, **fields: Any
) -> Decision:
    """Make a decision of the engine.

    Args:
        pool: ``own``, ``shared``, ``be`` or ``system``.
        cpus: Its CPUs, as a list such as ``2-5``; all of them are its own if the pool is ``own``.
        mems: Its memory nodes.
        fields: Other fields; ``allowed`` is ``cpus`` if it is not given, and ``allowed_mems`` is ``mems``.
    """
    usual = {"own": samples.OWN, "be": samples.BE}.get(pool, samples.SHARED)
    given: dict[str, Any] = {"pool": pool}
    if cpus is not None:
        given["cpus"] = given["allowed"] = CpuSet.parse(cpus) if isinstance(cpus, str) else cpus
        given["own"] = given["cpus"] if pool == "own" else CpuSet()
    if mems is not None:
        given["mems"] = given["allowed_mems"] = Mask.parse(mems) if isinstance(mems, str) else mems
    return dataclasses.replace(usual, **{**given, **fields})


def machine(
    sockets: int = 2, nodes_per_socket: int = 1, cores_per_node: int = 4, threads: int = 2, **fields: Any
) -> Machine:
    """Make a machine of equal parts, for ``event("synchronize", machine=...)`` and ``machine_changed``.

    CPUs are numbered as on most servers: the second threads of all cores follow the first ones. The defaults
    make two nodes with CPUs 0-3,8-11 and 4-7,12-15, and CPU 8 is the second thread of the core of CPU 0.

    Args:
        sockets: Sockets in the machine.
        nodes_per_socket: NUMA nodes in each.
        cores_per_node: Cores in each NUMA node.
        threads: CPUs of each core.
        fields: Other fields of ``Machine``, such as ``isolated``.

    Raises:
        TopologyError: A count is below one.
    """
    return dataclasses.replace(regular_machine(sockets, nodes_per_socket, cores_per_node, threads), **fields)


def running(
    container_id: str = "c1",
    *,
    pod: PodFacts | None = None,
    container: ContainerFacts | None = None,
    decision: Decision | None = None,
) -> Running:
    """Make a container that exists, for ``event("synchronize", containers=[...])``."""
    made = container if container is not None else samples.existing()
    made = dataclasses.replace(made, id=container_id, phase="running" if not made.id else made.phase)
    return Running(pod or samples.POD, made, decision or samples.OWN)


def _fixed(value: Any) -> Any:
    """Convert plain values to immutable ones, as in a configuration that was read."""
    if isinstance(value, Mapping):
        return FrozenMapping({str(key): _fixed(entry) for key, entry in value.items()})
    return tuple(_fixed(entry) for entry in value) if isinstance(value, list | tuple) else value


def _call_in_thread(hooks: Sequence[Hook], event: Point) -> tuple[Outcome, str]:
    """Call hooks in a separate thread: the thread of a test may run an event loop already."""
    results: list[tuple[Outcome, str]] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(asyncio.run(_call(hooks, event)))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the test
            errors.append(error)

    thread = threading.Thread(target=call, name="hooks tested", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


async def _call(hooks: Sequence[Hook], event: Point) -> tuple[Outcome, str]:
    engine = HookEngine(silent, lambda updates, owners: None)
    try:
        engine.use(hooks)
        least = least_seconds(event)
        async with asyncio.timeout(SPARE_S + sum(max(hook.timeout, least) for hook in hooks)):
            outcome = await engine.call_hooks(event, least).wait()
        failed = [report for report in engine.report() if report.last_error]
    finally:
        engine.close()
    return outcome, "\n".join(
        f"hook {report.name}: {report.last_error}\n{report.last_trace}".strip() for report in failed
    )

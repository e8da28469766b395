"""Logs the changes of hooks, one line for each call; changes nothing itself.

    hooks changed a request call=CreateContainer pod=shop/db-0 container=main
        changes="20-quota-off: cpu_quota 400000 -> -1; 30-cpus-file: envs[EXCLUSIVE_CPUS], mounts[/run/x]"

(in one line). It receives the merged answers of all hooks, including hook servers, before any is applied. Of
environments, annotations and labels only the names are logged, because values may be secrets; ``values`` logs
them as well. Enable this hook to find the hook that makes a change, and to try new hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from proxy.hooks.api import (
    CLEAR,
    LEAVE,
    Adjustment,
    Configure,
    Device,
    Mount,
    Resources,
    ValidateCreateContainer,
    ValidateRunPodSandbox,
    ValidateUpdateContainerResources,
)
from proxy.logs import log

API_VERSION = 1

_LONGEST = 200
_SECRET = frozenset(("envs", "annotations", "labels"))
_CALLS = {
    ValidateRunPodSandbox: "RunPodSandbox",
    ValidateCreateContainer: "CreateContainer",
    ValidateUpdateContainerResources: "UpdateContainerResources",
}


@dataclass(frozen=True)
class Settings:
    """The data that is logged."""

    values: bool = field(
        default=False, metadata={"help": "Log values of environments, annotations and labels, too."}
    )


_settings = Settings()


def configure(event: Configure) -> None:
    """Take the settings."""
    global _settings
    _settings = event.settings


def validate_run_pod_sandbox(event: ValidateRunPodSandbox) -> None:
    """Log the changes of a sandbox."""
    _log_changes(event, event.event.resources, "")


def validate_create_container(event: ValidateCreateContainer) -> None:
    """Log the changes of a new container."""
    _log_changes(event, event.event.container.resources, event.event.container.name)


def validate_update_container_resources(event: ValidateUpdateContainerResources) -> None:
    """Log the changes of an update."""
    _log_changes(event, event.event.asked, event.event.container.name)


def _log_changes(
    event: ValidateRunPodSandbox | ValidateCreateContainer | ValidateUpdateContainerResources,
    requested: Resources,
    container: str,
) -> None:
    if not event.owners:
        return
    changes: dict[str, list[str]] = {}
    for name, words in _changes(event.adjustment, requested):
        changes.setdefault(event.owners.get(name, "?"), []).append(words)
    keys = {"container": container} if container else {}
    log.info(
        "hooks changed a request",
        call=_CALLS[type(event)],
        pod=event.event.pod.ref,
        **keys,
        changes="; ".join(f"{hook}: {', '.join(words)}" for hook, words in sorted(changes.items())),
    )


def _changes(adjustment: Adjustment, requested: Resources) -> Iterator[tuple[str, str]]:
    """Iterate over the changes: the field, as in ``event.owners``, and the change in words."""
    for name, value in adjustment.set_fields():
        if name == "updates":
            yield from _update_changes(adjustment)
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                where = f"{name}[{key}]"
                yield where, f"{_shown(where)}{_entry(name, entry)}"
        else:
            before = getattr(requested, {"cpus": "cpuset_cpus", "mems": "cpuset_mems"}.get(name, name), None)
            was = f" {before if before != '' else 'any'} ->" if before is not None else ""
            yield name, f"{name}{was} {_shown(value)}"


def _update_changes(adjustment: Adjustment) -> Iterator[tuple[str, str]]:
    for container, update in adjustment.updates.items():
        about = f"updates[{container}]"
        for item in fields(update):
            value = getattr(update, item.name)
            if item.name == "unified":
                yield from ((f"{about}.unified[{file}]", f"{about}.unified[{file}]") for file in value)
            elif value is not LEAVE:
                yield f"{about}.{item.name}", f"{about}.{item.name} {_shown(value)}"


def _entry(name: str, value: object) -> str:
    """Return the value that a key of a map gets, unless it may be a secret."""
    if value is CLEAR:
        return " cleared"
    if name in _SECRET and not _settings.values:
        return ""
    if isinstance(value, Mount):
        return f" {_shown(value.host_path)}{' (read-only)' if value.readonly else ''}"
    if isinstance(value, Device):
        return f" {_shown(value.host_path)} ({value.permissions})"
    return f" {_shown(value)}"


def _shown(value: object) -> str:
    return "cleared" if value is CLEAR else str(value)[:_LONGEST]

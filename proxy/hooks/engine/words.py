"""Sentences about events: what was to be done, and to whom."""

from __future__ import annotations

from typing import Any, Final

from proxy.hooks.points import Point

_DOES: Final = {
    "run_pod_sandbox": "run pod",
    "create_container": "create container",
    "start_container": "start container",
    "update_container_resources": "change the resources of container",
    "stop_container": "stop container",
    "remove_container": "remove container",
    "stop_pod_sandbox": "stop pod",
    "remove_pod_sandbox": "remove pod",
}


def pod_of(event: Point) -> Any:
    """Give the facts of the pod that an event is about; None where it is about none."""
    event = getattr(event, "event", event)  # what is validated is about what was asked
    return getattr(event, "pod", None)


def whom(event: Point) -> str:
    """Say whom an event is about: ``namespace/pod``, ``namespace/pod/container``, or empty."""
    event = getattr(event, "event", event)
    pod = getattr(event, "pod", None)
    if pod is None:
        return ""
    container = getattr(event, "container", None)
    return f"{pod.ref}/{container.name}" if container is not None else str(pod.ref)


def task(event: Point) -> str:
    """Say what was to be done: ``create container namespace/pod/name``, or the point's name."""
    _, _, call = event.NAME.partition("_")
    does = _DOES.get(call)
    return f"{does} {whom(event)}" if does is not None else event.NAME


def shown(value: object, most: int = 100) -> str:
    """Write a value of a hook's answer, cut short and on one line."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - it may be a hook's class
        text = f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= most and text.isprintable() else repr(text[:most])


def seconds(value: float) -> str:
    """Write a time: ``500 ms``, ``2 s``."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"

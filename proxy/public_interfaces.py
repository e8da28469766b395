"""Lists the public interfaces as data: the page ``/interface``, which ``topoproxy upgrade --check`` reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxy import __version__
from proxy.backends.ledger.format import FORMAT
from proxy.config.schema import API_VERSION, Config, keys
from proxy.model import schema_ids
from proxy.model.hook_api_versions import SUPPORTED
from proxy.telemetry import metrics
from proxy.telemetry.registry import Metric


def interface(config: Config) -> dict[str, object]:
    """Return the public interfaces of this version, and its configuration in effect.

    Args:
        config: The configuration.
    """
    options = {} if config.origin is None else config.origin.options
    return {
        "schema": schema_ids.INTERFACE,
        "version": __version__,
        "configuration": {
            "apiVersion": API_VERSION,
            "defaults": dict(settings(Config())),
            "effective": dict(settings(config)),
            "options": {key: text for key, (_, text) in options.items()},
        },
        "ledger": {"writes": FORMAT, "reads": [FORMAT]},
        "hooks": list(SUPPORTED),
        "answers": sorted(value for name, value in vars(schema_ids).items() if name.isupper()),
        "metrics": sorted(name for metric in metrics.DAEMON_METRICS for name in metric_names(metric)),
    }


def settings(part: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key with its section, and its value as the file would have it."""
    for item, key, setting in keys(part):
        value = getattr(part, item.name)
        if setting is None:
            yield from settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(setting.kind.show(value))


def metric_names(metric: Metric) -> Iterator[str]:
    """Yield the exported name of a metric, and its former name if it still has one."""
    yield metric.full_name()
    if metric.former:
        yield metric.full_name(metric.former)


def shipped_unit(name: str) -> Path:
    """Return the unit file that comes with this version."""
    package = Path(__file__).resolve().parent
    installed = package / "units" / name
    return installed if installed.is_file() else package.parent / "systemd" / name

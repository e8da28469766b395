"""The configuration: a YAML file with kubelet's names, read into one frozen value."""

from __future__ import annotations

from proxy.config.checks import check
from proxy.config.endpoint import parse_endpoint, show_endpoint
from proxy.config.load import DEFAULT_FILE, load, override, parse
from proxy.config.machine_checks import check_against
from proxy.config.schema import (
    Config,
    CpuManagerPolicy,
    KubeletConfig,
    LogFormat,
    MemoryManagerPolicy,
    OnError,
    OwnerMemoryNodes,
    ReserveConfig,
    SettleConfig,
)
from proxy.config.show import as_mapping, as_yaml

__all__ = [
    "DEFAULT_FILE",
    "Config",
    "CpuManagerPolicy",
    "KubeletConfig",
    "LogFormat",
    "MemoryManagerPolicy",
    "OnError",
    "OwnerMemoryNodes",
    "ReserveConfig",
    "SettleConfig",
    "as_mapping",
    "as_yaml",
    "check",
    "check_against",
    "load",
    "override",
    "parse",
    "parse_endpoint",
    "show_endpoint",
]

"""Facts about kubelet on this node: its endpoint, its cgroup driver and the policies of its managers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from proxy.backends.kubelet.cri_endpoint import kubelet_files, running_flags
from proxy.backends.kubelet.small_file import read_small_file
from proxy.backends.kubelet.unit_files import Span
from proxy.config import Config
from proxy.doctor.facts import EndpointSetting, KubeletSetup
from proxy.doctor.file_text import SMALL_FILE_BYTES, file_text

STATE_FILES = ("cpu_manager_state", "memory_manager_state")
"""Files in kubelet's directory with the policies of its managers."""
_DRIVER = re.compile(r"^\s*cgroupDriver:\s*[\"']?(\w+)", re.MULTILINE)
_POLICY = re.compile(r'"policyName"\s*:\s*"(\w+)"')


def read_kubelet(config: Config) -> KubeletSetup:
    """Read what kubelet's process and its files say.

    Raises:
        PermissionError: One of its files may not be read.
    """
    directory, flags = config.kubelet.state_dir, running_flags(config.procfs_root) or {}
    running = flags.get("container-runtime-endpoint")
    file = config.kubelet.config_file or Path(flags.get("config") or directory / "config.yaml")
    for path in _kubelet_sources(file, directory, flags):
        _require_readable(path)
    driver = _DRIVER.search(file_text(file) or "")
    files = kubelet_files(directory, flags)
    cpu_policy, memory_policy = (_policy(directory / name) for name in STATE_FILES)
    return KubeletSetup(
        str(directory) if directory.is_dir() else "",
        None if running is None else EndpointSetting("the running kubelet", running),
        None if files.effective is None else _setting(files.effective),
        driver[1] if driver else "",
        cpu_policy,
        memory_policy,
        None if files.instance is None else _setting(files.instance),
        tuple(map(_setting, files.overridden)),
    )


def _setting(value: Span) -> EndpointSetting:
    return EndpointSetting(str(value.path), value.text)


def _kubelet_sources(file: Path, directory: Path, flags: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files from which the facts about kubelet are read, whether they exist or not.

    Raises:
        PermissionError: The directory of kubelet's drop-ins may not be listed.
    """
    yield file
    for name in ("config.yaml", "kubeadm-flags.env", "instance-config.yaml", *STATE_FILES):
        yield directory / name
    if drop_ins := flags.get("config-dir"):
        try:
            yield from Path(drop_ins).iterdir()
        except (FileNotFoundError, NotADirectoryError):
            return


def _require_readable(path: Path) -> None:
    """Raise for a file that may not be read: otherwise it would look like one that does not exist.

    Raises:
        PermissionError: The file may not be read.
    """
    try:
        read_small_file(str(path), SMALL_FILE_BYTES)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return


def _policy(path: Path) -> str:
    match = _POLICY.search(file_text(path) or "")
    return match[1] if match else ""

"""Where kubelet is configured to find its container runtime, by the files that override ``config.yaml``.

Theory. kubelet's flag ``--container-runtime-endpoint`` wins over ``containerRuntimeEndpoint`` in its
configuration file (kubernetes v1.36 cmd/kubelet/app/server.go,
kubeletConfigFlagPrecedence). kubeadm wrote that flag to ``kubeadm-flags.env``; since its feature
NodeLocalCRISocket (KEP-4656) it writes ``instance-config.yaml`` and patches it over ``config.yaml`` at init,
join and upgrade.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from proxy.backends.kubelet.small_file import read_small

LARGEST = 64 << 10
_FLAG = re.compile(r"--container-runtime-endpoint[=\s]+([^\s\"']+)")
_KEY = re.compile(
    r"(?:^|[{,])\s*[\"']?containerRuntimeEndpoint[\"']?\s*:\s*[\"']?([^\s\"'#,}]+)", re.MULTILINE
)


def other_endpoints(directory: Path, ours: Path) -> list[tuple[Path, str]]:
    """Return the files that name another endpoint than ours, the one that wins first; blocks on the disk.

    Args:
        directory: kubelet's directory, usually ``/var/lib/kubelet``.
        ours: The socket that kubelet should use.
    """
    return [
        (path, endpoint)
        for path, endpoint in named_endpoints(directory)
        if endpoint.removeprefix("unix://") != str(ours)
    ]


def named_endpoints(directory: Path, flags: Mapping[str, str] | None = None) -> list[tuple[Path, str]]:
    """Return the files that name a runtime endpoint, the one that wins first; blocks on the disk.

    Of the files of ``--config-dir`` the last one that names an endpoint wins, also over the configuration.

    Args:
        directory: kubelet's directory, usually ``/var/lib/kubelet``.
        flags: The flags of the running kubelet, which may name the configuration file and drop-ins.
    """
    flags = flags or {}
    found = [
        *_named(directory / "kubeadm-flags.env", _FLAG),
        *_named(directory / "instance-config.yaml", _KEY),
    ]
    drop_ins = sorted(Path(flags["config-dir"]).glob("*.conf"), reverse=True) if "config-dir" in flags else []
    found += next((named for path in drop_ins if (named := _named(path, _KEY))), [])
    return [*found, *_named(Path(flags.get("config") or directory / "config.yaml"), _KEY)]


def _named(path: Path, pattern: re.Pattern[str]) -> list[tuple[Path, str]]:
    try:
        match = pattern.search(read_small(str(path), LARGEST)[0].decode("utf-8", "replace"))
    except (OSError, ValueError):
        return []
    return [] if match is None else [(path, match[1])]


def running_flags(procfs: Path) -> Mapping[str, str] | None:
    """Return the flags of the running kubelet by their names, without dashes; None where none runs."""
    try:
        entries = [entry for entry in procfs.iterdir() if entry.name.isdigit()]
    except OSError:
        return None
    for entry in entries:
        try:
            words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if Path(words[0]).name == "kubelet":
            return dict(_flags(words[1:]))
    return None


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield ``--name=value`` and ``--name value``; of a flag that is given twice, the last one counts."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            yield name[2:], value if has_value else after

"""Find the files that configure kubelet's container runtime endpoint.

Theory. kubelet's flag ``--container-runtime-endpoint`` wins over ``containerRuntimeEndpoint`` of the drop-ins
in ``--config-dir``, of which the last one wins, and these over the configuration file (kubernetes v1.36
cmd/kubelet/app/server.go, kubeletConfigFlagPrecedence and mergeKubeletConfigurations). The flag comes from
kubelet's unit or its environment files, of which kubeadm's ``kubeadm-flags.env`` is one. Since its feature
NodeLocalCRISocket (KEP-4656) kubeadm writes ``instance-config.yaml`` instead. kubelet does not read that
file: kubeadm patches it over ``config.yaml`` at init, join and upgrade.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from proxy.backends.kubelet.rancher_files import rancher_files
from proxy.backends.kubelet.unit_files import Span, flags_of, last_flag, read_span, unit_command

UNIT = "kubelet.service"
MICROK8S_UNIT = "snap.microk8s.daemon-kubelite.service"
MICROK8S = "var/snap/microk8s/current/args/kubelet"
DEFAULT = "unix:///run/containerd/containerd.sock"
"""What kubelet uses where nothing names an endpoint (v1.36 pkg/kubelet/apis/config/v1beta1/defaults.go)."""
_KEY = re.compile(
    r"(?:^|[{,]\s*)[\"']?containerRuntimeEndpoint[\"']?[ \t]*:[ \t]*"
    r"(?:\"([^\"\n]+)\"|'([^'\n]+)'|([^\s\"'#,{}][^\s,}]*))",
    re.MULTILINE,
)


class KubeletFiles(Struct, frozen=True):
    """Files that decide on kubelet's endpoint.

    Attributes:
        unit: The unit that runs kubelet; empty where no file of it was found.
        flag: The value of the flag; None where no file names it.
        instance: The value in kubeadm's ``instance-config.yaml``, which is not in effect by itself.
        drop_in: The value in the last drop-in that has one.
        config: The value in the configuration file.
        config_file: That file, also where it names none.
        default: What kubelet uses where no file names an endpoint.
        own_file: Where k3s or RKE2 reads a flag of ours; None where kubelet is a unit of its own.
    """

    unit: str
    flag: Span | None
    instance: Span | None
    drop_in: Span | None
    config: Span | None
    config_file: Path
    default: str = DEFAULT
    own_file: Path | None = None

    @property
    def effective(self) -> Span | None:
        """The value that kubelet uses at its next start; None where that is its default."""
        return self.flag or self.drop_in or self.config

    def named(self) -> list[tuple[Path, str]]:
        """Return the files that name an endpoint, the one that wins first."""
        each = (self.flag, self.instance, self.drop_in, self.config)
        return [(span.path, span.text) for span in each if span is not None]


def kubelet_files(
    directory: Path, flags: Mapping[str, str] | None = None, root: Path = Path("/")
) -> KubeletFiles:
    """Find the files that decide on kubelet's endpoint; blocks on the disk.

    Args:
        directory: kubelet's directory, usually ``/var/lib/kubelet``; below ``root`` already.
        flags: The flags of the running kubelet, which count where no unit of it is found.
        root: Used in place of ``/``.
    """
    command = unit_command(root, UNIT)
    unit = UNIT if command else ""
    if command is not None:
        flag, flags = command.endpoint(), command.flags()
    elif args := read_span(root / MICROK8S):
        unit, flag, flags = MICROK8S_UNIT, last_flag(args), dict(flags_of(args.text.split()))
    elif rancher := rancher_files(root):
        config = root / rancher.own_file.parent.with_suffix("").relative_to("/")
        return KubeletFiles(
            rancher.unit, rancher.argument, None, None, None, config, rancher.runtime, rancher.own_file
        )
    else:
        env, flags = read_span(directory / "kubeadm-flags.env"), flags or {}
        flag = last_flag(env) if env else None
    config = _below(root, flags["config"]) if flags.get("config") else directory / "config.yaml"
    drop_ins = list(_drop_ins(_below(root, flags["config-dir"]))) if flags.get("config-dir") else []
    named = (span for path in reversed(drop_ins) if (span := _key(path)))
    return KubeletFiles(
        unit, flag, _key(directory / "instance-config.yaml"), next(named, None), _key(config), config
    )


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/") if root != Path("/") and not path.startswith(f"{root}/") else Path(path)


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
    """Return the files that name a runtime endpoint, the one that wins first; see ``kubelet_files``."""
    return kubelet_files(directory, flags).named()


def _drop_ins(directory: Path) -> Iterator[Path]:
    """Yield the drop-ins in kubelet's order: as filepath.WalkDir of Go, by name, directories included."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _drop_ins(Path(entry.path))
        elif entry.name.endswith(".conf"):
            yield Path(entry.path)


def _key(path: Path) -> Span | None:
    """Return where a file's ``containerRuntimeEndpoint`` is; None where it has none."""
    whole = read_span(path)
    found = None
    for match in _KEY.finditer(whole.text if whole else ""):
        assert whole is not None
        group = next(number for number in (1, 2, 3) if match[number] is not None)
        found = whole.part(*match.span(group))
    return found


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
            return dict(flags_of(words[1:]))
    return None

"""Find the files that configure kubelet's container runtime endpoint.

kubelet's flag ``--container-runtime-endpoint`` overrides ``containerRuntimeEndpoint`` in the drop-ins of
``--config-dir``. The last of these drop-ins is effective, and they override the configuration file
(kubernetes v1.36 cmd/kubelet/app/server.go, kubeletConfigFlagPrecedence and mergeKubeletConfigurations). The
flag comes from kubelet's unit or its environment files, such as kubeadm's ``kubeadm-flags.env``. Since its
feature NodeLocalCRISocket (KEP-4656) kubeadm writes ``instance-config.yaml`` instead. kubelet does not read
that file: kubeadm patches it over ``config.yaml`` at init, join and upgrade.

k3s and RKE2 (docs.k3s.io and docs.rke2.io, Configuration Options) start kubelet, and read ``config.yaml``,
then ``config.yaml.d/*.yaml`` in the order of their names. If several files have a key, the last one is
effective; a key that ends in ``+`` adds to a list. ``kubelet-arg`` is a list of kubelet's flags, without
dashes. A flag overrides the configuration that k3s writes for kubelet (k3s v1.32
pkg/daemons/agent/agent_linux.go, kubeletArgsAndConfig). ``container-runtime-endpoint`` is a different
setting: if it is set, k3s does not start its embedded containerd (pkg/agent/run.go, startCRI). So this
setting is not changed: it names the runtime behind topoproxy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from proxy.backends.kubelet.unit_files import (
    Span,
    flags_of,
    last_endpoint_flag,
    read_span,
    unit_command,
    unit_sources,
)

KUBELET_UNIT = "kubelet.service"
MICROK8S_UNIT = "snap.microk8s.daemon-kubelite.service"
MICROK8S_ARGUMENTS = "var/snap/microk8s/current/args/kubelet"
DEFAULT_ENDPOINT = "unix:///run/containerd/containerd.sock"
"""kubelet's endpoint if no file names one (v1.36 pkg/kubelet/apis/config/v1beta1/defaults.go)."""
_KEY = re.compile(
    r"(?:^|[{,]\s*)[\"']?containerRuntimeEndpoint[\"']?[ \t]*:[ \t]*"
    r"(?:\"([^\"\n]+)\"|'([^'\n]+)'|([^\s\"'#,{}][^\s,}]*))",
    re.MULTILINE,
)
_NULLS = ("null", "Null", "NULL", "~")
"""Words that YAML reads as no value, for which kubelet uses its default."""

RANCHER_ENDPOINT = "unix:///run/k3s/containerd/containerd.sock"
"""The containerd of k3s and of RKE2."""
RANCHER_UNITS = {
    "k3s.service": "k3s",
    "k3s-agent.service": "k3s",
    "rke2-server.service": "rke2",
    "rke2-agent.service": "rke2",
}
TOPOPROXY_FILE = "zz-topoproxy.yaml"
_WANTS = "etc/systemd/system/multi-user.target.wants"
_KUBELET_ARGUMENT = re.compile(r"^[^#\n]*?\bcontainer[-_]runtime[-_]endpoint=([^\s\"',\]]+)", re.MULTILINE)
_RUNTIME_KEY = re.compile(r"^container-runtime-endpoint[ \t]*:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)


class RancherFiles(Struct, frozen=True):
    """How kubelet is configured inside k3s or RKE2.

    Attributes:
        unit: The unit that runs it.
        argument: The endpoint in ``kubelet-arg``; None if no file has it.
        runtime: The endpoint that kubelet gets if ``argument`` is None.
        topoproxy_file: The file in which topoproxy can add a flag; it is read after all others.
    """

    unit: str
    argument: Span | None
    runtime: str
    topoproxy_file: Path


def rancher_files(root: Path) -> RancherFiles | None:
    """Find the files of k3s or RKE2; None if neither is installed; blocks on the disk.

    Args:
        root: Used in place of ``/``.
    """
    units = [unit for unit in RANCHER_UNITS if unit_sources(root, unit)]
    if not units:
        return None
    # RKE2 installs both of its units, and enables one.
    unit = next((unit for unit in units if (root / _WANTS / unit).is_symlink()), units[0])
    config = Path("etc/rancher") / RANCHER_UNITS[unit] / "config.yaml"
    drop_ins = root / f"{config}.d"
    argument, runtime = None, RANCHER_ENDPOINT
    for path in (root / config, *sorted(drop_ins.glob("*.yaml"))):
        whole = read_span(path)
        for match in _KUBELET_ARGUMENT.finditer(whole.text if whole else ""):
            assert whole is not None
            argument = whole.part(*match.span(1))
        for match in _RUNTIME_KEY.finditer(whole.text if whole else ""):
            runtime = match[1]
    return RancherFiles(unit, argument, runtime, Path("/") / f"{config}.d" / TOPOPROXY_FILE)


class KubeletFiles(Struct, frozen=True):
    """The files that determine kubelet's endpoint.

    Attributes:
        unit: The unit that runs kubelet; empty if no file of it was found.
        flag: The value of the flag; None if no file sets it.
        instance: The value in kubeadm's ``instance-config.yaml``, which is not in effect by itself.
        drop_in: The value in the last drop-in that has one.
        config: The value in the configuration file.
        config_file: The configuration file, even if it names no endpoint.
        default: The endpoint that kubelet uses if no file names one.
        topoproxy_file: The file from which k3s or RKE2 reads topoproxy's flag; None if kubelet has its own
            unit.
    """

    unit: str
    flag: Span | None
    instance: Span | None
    drop_in: Span | None
    config: Span | None
    config_file: Path
    default: str = DEFAULT_ENDPOINT
    topoproxy_file: Path | None = None

    @property
    def effective(self) -> Span | None:
        """The value that kubelet uses at its next start; None if it uses its default."""
        return self.flag or self.drop_in or self.config

    @property
    def overridden(self) -> list[Span]:
        """The values that kubelet does not use because another value overrides them."""
        each = (self.drop_in, self.config)
        return [span for span in each if span is not None and span is not self.effective]

    def named(self) -> list[tuple[Path, str]]:
        """Return the files that name an endpoint, with the highest precedence first."""
        each = (self.flag, self.instance, self.drop_in, self.config)
        return [(span.path, span.text) for span in each if span is not None]


def kubelet_files(
    directory: Path, flags: Mapping[str, str] | None = None, root: Path = Path("/")
) -> KubeletFiles:
    """Find the files that determine kubelet's endpoint; blocks on the disk.

    Args:
        directory: kubelet's directory, usually ``/var/lib/kubelet``; the path includes ``root``.
        flags: The flags of the running kubelet, which are used if no unit of kubelet is found.
        root: Used in place of ``/``.
    """
    command = unit_command(root, KUBELET_UNIT)
    unit = KUBELET_UNIT if command else ""
    if command is not None:
        flag, flags = command.endpoint(), command.flags()
    elif args := read_span(root / MICROK8S_ARGUMENTS):
        unit, flag, flags = MICROK8S_UNIT, last_endpoint_flag(args), dict(flags_of(args.text.split()))
    elif rancher := rancher_files(root):
        config = root / rancher.topoproxy_file.parent.with_suffix("").relative_to("/")
        return KubeletFiles(
            rancher.unit, rancher.argument, None, None, None, config, rancher.runtime, rancher.topoproxy_file
        )
    else:
        env, flags = read_span(directory / "kubeadm-flags.env"), flags or {}
        flag = last_endpoint_flag(env) if env else None
    config = _below(root, flags["config"]) if flags.get("config") else directory / "config.yaml"
    drop_ins = list(_drop_ins(_below(root, flags["config-dir"]))) if flags.get("config-dir") else []
    named = (span for path in reversed(drop_ins) if (span := _endpoint_of_file(path)))
    return KubeletFiles(
        unit,
        flag,
        _endpoint_of_file(directory / "instance-config.yaml"),
        next(named, None),
        _endpoint_of_file(config),
        config,
    )


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/") if root != Path("/") and not path.startswith(f"{root}/") else Path(path)


def other_endpoints(directory: Path, own_socket: Path) -> list[tuple[Path, str]]:
    """Return the files that name another endpoint, with the highest precedence first; blocks on the disk.

    Args:
        directory: kubelet's directory, usually ``/var/lib/kubelet``.
        own_socket: The socket that kubelet should use.
    """
    return [
        (path, endpoint)
        for path, endpoint in named_endpoints(directory)
        if endpoint.removeprefix("unix://") != str(own_socket)
    ]


def named_endpoints(directory: Path, flags: Mapping[str, str] | None = None) -> list[tuple[Path, str]]:
    """Return the files that name an endpoint, with the highest precedence first; see ``kubelet_files``."""
    return kubelet_files(directory, flags).named()


def _drop_ins(directory: Path) -> Iterator[Path]:
    """Yield the drop-ins in kubelet's order, which is that of Go's filepath.WalkDir: by name, recursively."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _drop_ins(Path(entry.path))
        elif entry.name.endswith(".conf"):
            yield Path(entry.path)


def _endpoint_of_file(path: Path) -> Span | None:
    """Return the position of a file's ``containerRuntimeEndpoint``; None if it has none, or null."""
    whole = read_span(path)
    value = None
    for match in _KEY.finditer(whole.text if whole else ""):
        assert whole is not None
        group = next(number for number in (1, 2, 3) if match[number] is not None)
        if match[3] not in _NULLS:
            value = whole.part(*match.span(group))
    return value


def running_flags(procfs: Path) -> Mapping[str, str] | None:
    """Return the flags of the running kubelet by name, without dashes; None if kubelet does not run."""
    try:
        entries = [entry for entry in procfs.iterdir() if entry.name.isdigit()]
    except OSError:
        return None
    for entry in entries:
        try:
            arguments = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue  # the process has ended
        if Path(arguments[0]).name == "kubelet":
            return dict(flags_of(arguments[1:]))
    return None

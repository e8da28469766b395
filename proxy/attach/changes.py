"""Computes the new content of the files that an attach changes, and runs ``systemctl``.

Every node with systemd has this command, and it needs no connection to D-Bus. The other functions are pure. A
file of the operator or of kubelet (below ``/etc``, ``/run``, ``/var``) is changed in place. The unit files of
a package are not changed: a drop-in repeats the one setting of the unit with the new endpoint.
"""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from proxy.backends.kubelet.cri_endpoint import DEFAULT_ENDPOINT, KubeletFiles
from proxy.backends.kubelet.unit_files import Span
from proxy.model.errors import PermissionDeniedError, TopoproxyError
from proxy.topology.yaml_events import read_yaml

DROP_IN_NAME = "zz-topoproxy.conf"
_KEY = "containerRuntimeEndpoint"
_EMPTY_KEY = re.compile(
    rf"(?:^|[{{,]\s*)[\"']?{_KEY}[\"']?[ \t]*:(?:[ \t]*(?:(\"\"|'')|(null|Null|NULL|~)(?=[\s,}}]|$))"
    r"|(?=[ \t]*(?:[ \t]#|[,}}]|\r?$)))",
    re.MULTILINE,
)
"""The key without a value; the groups are its quotes and its null, if it has them."""
_CHANGEABLE = ("etc", "run", "var")

UNIT_PROPERTIES = ("ActiveState", "SubState", "Result", "MainPID", "ControlGroup", "NRestarts")


def systemctl(arguments: Sequence[str], limit: float) -> str:
    """Run ``systemctl``.

    Args:
        arguments: Its arguments.
        limit: Seconds that it may take.

    Returns:
        Its output.

    Raises:
        TopoproxyError: It fails, or takes longer.
    """
    what = f"systemctl {' '.join(arguments)}"
    try:
        done = subprocess.run(  # noqa: S603  the words are ours
            ["systemctl", *arguments],  # noqa: S607  the command of the node's PATH
            capture_output=True,
            text=True,
            timeout=max(limit, 1.0),
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise TopoproxyError(f"cannot run {what}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise TopoproxyError(f"cannot run {what}: it takes more than {limit:.0f} s") from None
    if done.returncode:
        cause = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise TopoproxyError(f"cannot run {what}: {cause[0]}")
    return done.stdout


def enabled_state(unit: str) -> str:
    """Return ``enabled``, ``disabled``, ``masked`` and so on; empty if there is no such unit."""
    try:
        done = subprocess.run(  # noqa: S603
            ["systemctl", "is-enabled", unit],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def unit_state(unit: str) -> dict[str, str]:
    """Return the properties that describe the state of a unit; empty if they cannot be read."""
    try:
        text = systemctl(["show", unit, "-p", ",".join(UNIT_PROPERTIES)], 10)
    except TopoproxyError:
        return {}
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)


class FileChange(Struct, frozen=True):
    """A file that is changed.

    Attributes:
        path: The file on the node, without the directory that stands for ``/``.
        before: Its bytes before the change; None if there is no file.
        after: Its bytes after the change.
    """

    path: Path
    before: bytes | None
    after: bytes

    def diff(self) -> str:
        """Return the change as a unified diff."""
        old = (self.before or b"").decode("utf-8", "replace").splitlines(keepends=True)
        new = self.after.decode("utf-8", "replace").splitlines(keepends=True)
        name = str(self.path)
        lines = difflib.unified_diff(old, new, "/dev/null" if self.before is None else name, name)
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


def endpoint_changes(files: KubeletFiles, root: Path, endpoint: str) -> list[FileChange]:
    """Return the changes that point kubelet at an endpoint: of the file in effect, and of kubeadm's copy.

    Args:
        files: The files that decide on kubelet's endpoint.
        root: The directory that stands for ``/``.
        endpoint: The endpoint, such as ``unix:///run/topoproxy/cri.sock``.

    Raises:
        TopoproxyError: A file cannot be changed in its present form.
    """
    return list(_endpoint_changes(files, root, endpoint))


def _endpoint_changes(files: KubeletFiles, root: Path, endpoint: str) -> Iterator[FileChange]:
    value = files.effective
    if files.topoproxy_file is not None:
        if value is None or value.text != endpoint:
            yield _kubelet_argument(files.topoproxy_file, root, endpoint)
    elif value is None:
        yield _with_key(files.config_file, root, endpoint)
    elif value.text != endpoint:
        yield _changed_in_effect(value, files, root, endpoint)
    instance = files.instance
    if instance is not None and instance.text != endpoint:
        yield _checked(instance, root, endpoint)


def _changed_in_effect(value: Span, files: KubeletFiles, root: Path, endpoint: str) -> FileChange:
    if value is not files.flag:
        return _checked(value, root, endpoint)
    path = value.path.resolve().relative_to(root.resolve())
    if path.parts[0] in _CHANGEABLE:
        return value_change(value, root, endpoint)
    return _drop_in(value, files.unit, root, endpoint)


def _kubelet_argument(path: Path, root: Path, endpoint: str) -> FileChange:
    """Set a flag of kubelet in the file of k3s or RKE2 that is read last."""
    target = root / path.relative_to("/")
    content = (
        "# Made by topoproxy attach; topoproxy detach removes it.\n"
        f"kubelet-arg+:\n  - container-runtime-endpoint={endpoint}\n"
    )
    return FileChange(path, target.read_bytes() if target.is_file() else None, content.encode())


def value_change(value: Span, root: Path, new: str) -> FileChange:
    """Change a value in place.

    Raises:
        TopoproxyError: The file has changed since it was read.
    """
    path = value.path.resolve()
    text = path.read_bytes().decode()
    if text[value.start : value.end] != value.text:
        raise TopoproxyError(f"cannot change {path}: it changed meanwhile")
    changed = f"{text[: value.start]}{new}{text[value.end :]}"
    return FileChange(Path("/") / path.relative_to(root.resolve()), text.encode(), changed.encode())


def _checked(value: Span, root: Path, endpoint: str) -> FileChange:
    """Change a configuration file, and check that only the endpoint differs."""
    change = value_change(value, root, endpoint)
    _check(change, endpoint)
    return change


def _check(change: FileChange, endpoint: str) -> None:
    assert change.before is not None
    try:
        old, new = read_yaml(change.before.decode()), read_yaml(change.after.decode())
    except ValueError as error:
        raise TopoproxyError(f"cannot change {change.path}: {error}") from None
    if new != {**(old if isinstance(old, dict) else {}), _KEY: endpoint}:
        raise TopoproxyError(
            f"cannot change {change.path}: its {_KEY} is written in an unusual way; set it to {endpoint}"
        )


def _with_key(config: Path, root: Path, endpoint: str) -> FileChange:
    """Set the key in the configuration file, where it is missing or empty, so kubelet uses its default."""
    try:
        path = config.resolve(strict=True)
        text = path.read_bytes().decode()
    except PermissionError as error:
        raise PermissionDeniedError(
            f"cannot attach kubelet: no file that can be read names its runtime endpoint, and {config} cannot"
            f" be read: {error.strerror}"
        ) from error
    except (OSError, ValueError):
        raise TopoproxyError(
            f"cannot attach kubelet: no file names its runtime endpoint, and there is no {config}:"
            f" start kubelet with --container-runtime-endpoint={DEFAULT_ENDPOINT} or with --config"
        ) from None
    empty = next(_EMPTY_KEY.finditer(text), None)
    if empty is not None and empty[2]:
        changed = f'{text[: empty.start(2)]}"{endpoint}"{text[empty.end(2) :]}'
    elif empty is not None:
        at, value = (empty.start(1) + 1, endpoint) if empty[1] else (empty.end(), f" {endpoint}")
        changed = f"{text[:at]}{value}{text[at:]}"
    elif text.lstrip().startswith("{"):
        at = text.index("{") + 1
        changed = f'{text[:at]}"{_KEY}": "{endpoint}", {text[at:]}'
    else:
        changed = f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{_KEY}: {endpoint}\n"
    change = FileChange(Path("/") / path.relative_to(root.resolve()), text.encode(), changed.encode())
    _check(change, endpoint)
    return change


def _drop_in(value: Span, unit: str, root: Path, endpoint: str) -> FileChange:
    """Repeat the setting of a package's unit in a drop-in that is read last."""
    text = value.path.read_bytes().decode()
    start = text.rfind("\nExec", 0, value.start), text.rfind("\nEnv", 0, value.start)
    begin = max(start) + 1
    end = value.end
    while (stop := text.find("\n", end)) != -1 and text[stop - 1] == "\\":
        end = stop + 1
    setting = f"{text[begin : value.start]}{endpoint}{text[value.end : stop if stop != -1 else len(text)]}"
    if not setting.startswith(("ExecStart", "Environment=")):
        raise TopoproxyError(
            f"cannot change {value.path}: it belongs to a package; set the endpoint to {endpoint} there"
        )
    clear = "ExecStart=\n" if setting.startswith("ExecStart") else ""
    content = f"# Made by topoproxy attach; topoproxy detach removes it.\n[Service]\n{clear}{setting}\n"
    path = Path("/etc/systemd/system") / f"{unit}.d" / DROP_IN_NAME
    target = root / path.relative_to("/")
    return FileChange(path, target.read_bytes() if target.is_file() else None, content.encode())


def copied_endpoints(
    files: KubeletFiles, root: Path, endpoint: str, previous: str, known: Collection[Path]
) -> list[FileChange]:
    """Return the changes of files that name our endpoint although no attach wrote it there.

    When kubeadm upgrades a node, it copies an endpoint from one file to another.

    Args:
        files: The files that decide on kubelet's endpoint.
        root: The directory that stands for ``/``.
        endpoint: The endpoint of topoproxy.
        previous: The endpoint that they must name again.
        known: The files that the attach wrote.
    """
    values = (files.flag, files.drop_in, files.config, files.instance)
    changes = [
        value_change(value, root, previous)
        for value in values
        if value is not None and value.text == endpoint
    ]
    return [change for change in changes if change.path not in known]

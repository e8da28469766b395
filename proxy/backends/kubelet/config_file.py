"""Reading kubelet's configuration file, YAML or JSON.

The file says less than ``/configz``: flags of kubelet's command line and drop-in files go over it, and it may
have been changed since kubelet read it. So it is queried second. What it does not say is kubelet's default.
"""

from __future__ import annotations

from proxy.backends.kubelet.manager_settings import ManagerSettings, manager_settings
from proxy.backends.kubelet.settings import KubeletError
from proxy.backends.kubelet.small_file import Stamp, read_small, stamp
from proxy.pools.go_json import load
from proxy.topology.yaml_events import read_yaml

KIND = "KubeletConfiguration"


class ConfigFile:
    """Kubelet's configuration file; read again when it has changed."""

    def __init__(self, path: str) -> None:
        """Store the path; nothing is opened yet."""
        self.path = path
        self._seen: Stamp | None = None
        self._settings: ManagerSettings | None = None
        self._failure = ""

    def read(self) -> ManagerSettings | None:
        """Return what it says; None where there is no file.

        Raises:
            KubeletError: It cannot be read, or holds something else.
        """
        try:
            now = stamp(self.path)
            if now is None or now != self._seen:
                self._settings, self._seen, self._failure = None, None, ""
            if now is None:
                return None
            if self._seen is None:
                content, self._seen = read_small(self.path)
                self._settings = manager_settings(_parsed(content))
        except (OSError, ValueError, RecursionError) as error:
            cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._failure = f"cannot read kubelet's configuration {self.path}: {cause}"
        if self._failure:
            raise KubeletError(self._failure)
        return self._settings


def _parsed(content: bytes) -> dict[str, object]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    raw = load(text, largest=None) if text.lstrip().startswith("{") else read_yaml(text)
    if not isinstance(raw, dict) or raw.get("kind", KIND) != KIND:
        raise ValueError(f"it holds no {KIND}")
    return raw

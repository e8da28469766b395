"""Reading the configuration that kubelet runs with from its endpoint ``/configz``.

This is the best word on it: flags and drop-in files are part of the answer, and a file that was changed and
not loaded yet is not.
"""

from __future__ import annotations

import json

from proxy.backends.kubelet.errors import KubeletError
from proxy.backends.kubelet.fetch import fetch_configz
from proxy.backends.kubelet.manager_settings import ManagerSettings, manager_settings
from proxy.backends.kubelet.settings import KubeletSettings


def read_configz(settings: KubeletSettings) -> ManagerSettings:
    """Ask kubelet.

    Raises:
        KubeletError: It does not answer in time, or not with its configuration; ``code`` is
            DEADLINE_EXCEEDED where it hangs.
    """
    content = fetch_configz(settings)
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _strange(settings, f"the answer is not JSON: {error}") from None
    config = answer.get("kubeletconfig") if isinstance(answer, dict) else None
    if not isinstance(config, dict):
        raise _strange(settings, "the answer holds no kubeletconfig")
    return manager_settings(config)


def _strange(settings: KubeletSettings, cause: str) -> KubeletError:
    where = settings.configz.rpartition("@")[2]  # never a password
    return KubeletError(f"cannot use the configuration of kubelet at {where}: {cause}")

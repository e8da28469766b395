"""Determines the state of the hook directories without a daemon."""

from __future__ import annotations

from typing import Any

from proxy.config.schema import HooksConfig
from proxy.hooks.loader.directories import HookFileEntry, HookFileState, scan_directories
from proxy.hooks.loader.examination import LOADS, examine
from proxy.hooks.loader.printing import printing_to_stderr
from proxy.hooks.status_data import hooks_page


def from_directories(config: HooksConfig) -> tuple[list[dict[str, Any]], list[str]]:
    """Examine all files as the daemon would, and run those that it would run; no hook is called.

    The output of the files goes to standard error.

    Returns:
        The hook files, in the form of the daemon's answer, and other problems of the directories.
    """
    scan = scan_directories(config)
    with printing_to_stderr():
        entries = [examine(candidate, config).entry for candidate in scan.candidates.values()]
    entries += [
        HookFileEntry(c.name, str(c.path), HookFileState.MASKED, f"{by} is used instead", server=c.server)
        for c, by in scan.masked
    ]
    entries.sort(key=lambda entry: (entry.name, entry.state is HookFileState.MASKED))
    page = hooks_page(entries, ())
    for entry in page:
        entry["state"] = LOADS if entry["state"] == HookFileState.RUNNING else entry["state"]
    return page, list(scan.ignored_files)

"""Reads the configuration in a process of its own.

The daemon has it read this way at a reload. Reading YAML takes tens of milliseconds in which the calls of
kubelet would wait, and memory that the daemon would keep; here both end with the process.

Standard input has an ``Origin`` as JSON; standard output has the settings, or the reason why they are
rejected.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from proxy import __version__
from proxy.config.load import load, override
from proxy.config.transfer import to_plain
from proxy.model.errors import TopoproxyError


def main() -> None:
    """Answer one request."""
    requested = json.load(sys.stdin)
    file = Path(requested["file"]) if requested["file"] else None
    answer: dict[str, object] = {"version": __version__}
    try:
        config = override(load(file, trusted=requested["trusted"]), requested["words"])
    except TopoproxyError as error:
        answer["error"] = str(error)
    else:
        answer |= {
            "source": config.source,
            "values": to_plain(config),
            "cluster_fault": config.cluster_fault,
            "former_keys": config.former_keys,
        }
        if config.own is not None:
            answer |= {"own": to_plain(config.own), "own_source": config.own.source}
    json.dump(answer, sys.stdout)

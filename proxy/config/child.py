"""Reads the configuration in a separate process.

The daemon uses it for a reload. Reading YAML takes tens of milliseconds, in which kubelet's calls would wait,
and memory, which the daemon would keep; in a separate process neither affects the daemon.

Standard input is an ``Origin`` as JSON. Standard output is the settings, or the reason why they are refused.
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
        if config.without_cluster is not None:
            answer |= {"own": to_plain(config.without_cluster), "own_source": config.without_cluster.source}
    json.dump(answer, sys.stdout)

"""The drop-in directory ``config.d`` next to the configuration file.

Drop-ins are merged over the file in the order of their names, key by key: keys with values are merged, at any
depth, and everything else (words, numbers, lists) is replaced as a whole. So a drop-in can add an entry to
``hooks.settings`` and replace one, and it cannot remove one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.model.errors import ConfigError, PermissionDeniedError

if TYPE_CHECKING:
    import yaml

DIRECTORY_NAME = "config.d"
SUFFIX = ".yaml"
MOST_FILES = 100


def drop_ins(file: Path) -> Path:
    """Return the drop-in directory of a configuration file."""
    return file.parent / DIRECTORY_NAME


def listed(file: Path) -> list[Path]:
    """Return the drop-ins of a configuration file in their order.

    Hidden files, and names that do not end with ``SUFFIX``, do not count.

    Raises:
        ConfigError: The directory cannot be read, or has too many files.
        PermissionDeniedError: The directory may not be read.
    """
    directory = drop_ins(file)
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot read the configuration {directory}: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {directory}: {error.strerror}") from error
    found = [directory / name for name in names if name.endswith(SUFFIX) and not name.startswith(".")]
    if len(found) > MOST_FILES:
        raise ConfigError(f"cannot use the configuration {directory}: it has more than {MOST_FILES} files")
    return found


def merged(base: yaml.Node, over: yaml.Node) -> yaml.Node:
    """Return two valid files as one; each node keeps its place in its file."""
    import yaml

    if not isinstance(base, yaml.MappingNode) or not isinstance(over, yaml.MappingNode):
        return over
    entries = {key.value: (key, value) for key, value in base.value}
    for key, value in over.value:
        known = entries.get(key.value)
        entries[key.value] = (key, value if known is None else merged(known[1], value))
    return yaml.MappingNode(over.tag, list(entries.values()), over.start_mark, over.end_mark)

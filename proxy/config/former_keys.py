"""Renamed keys of the configuration. The former name is accepted for one release."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import yaml

FORMER_KEYS = {
    "hooks": {
        "folder": "directory",
        "vendorFolder": "vendorDirectory",
        "serverFolder": "serverDirectory",
    },
}
"""Section to former key to the key that replaces it."""


def rename_former_keys(root: yaml.Node | None) -> list[str]:
    """Replace former keys in the nodes of a file, so that drop-ins merge by the current keys.

    Args:
        root: The nodes of a whole file, which need not be valid; None for an empty file.

    Returns:
        One sentence for each former key that was found.
    """
    import yaml

    found: list[str] = []
    for section, value in root.value if isinstance(root, yaml.MappingNode) else ():
        former = FORMER_KEYS.get(section.value) if isinstance(section, yaml.ScalarNode) else None
        if former is None or not isinstance(value, yaml.MappingNode):
            continue
        for key, _ in value.value:
            if isinstance(key, yaml.ScalarNode) and (now := former.get(key.value)):
                old, key.value = key.value, now
                found.append(f"{section.value}.{old} is now {section.value}.{now}: rename the key")
    return found

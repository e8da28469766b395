"""The sources of a configuration, so that it can be read again: the file and the command-line options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from proxy.config.frozen_mapping import FrozenMapping


@dataclass(frozen=True, slots=True)
class Origin:
    """The file and the command-line options that a configuration came from.

    Attributes:
        file: The file that the command line named; None for the default path.
        options: Key to the option that replaces it and the option's value. They take precedence over the
            file, even at a reload.
        trusted: Whether files that another user could have written are refused.
    """

    file: Path | None = None
    options: FrozenMapping[str, tuple[str, str]] = field(default_factory=FrozenMapping)
    trusted: bool = True

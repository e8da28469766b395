"""A configuration of another version is refused, with the key that only one version knows."""

from __future__ import annotations

import pytest

from proxy.config import Config
from proxy.config.transfer import from_plain, to_plain
from proxy.model.errors import ConfigError


def test_keys_of_another_version() -> None:
    values = to_plain(Config())
    with pytest.raises(ConfigError, match="mode is not known to both"):
        from_plain({key: value for key, value in values.items() if key != "mode"})
    with pytest.raises(ConfigError, match=r"log\.color is not known to both"):
        from_plain({**values, "log": {**values["log"], "color": "red"}})
    with pytest.raises(ConfigError, match="cannot read the settings of another version: onError: 'shrug'"):
        from_plain({**values, "onError": "shrug"})
    with pytest.raises(ConfigError, match=r"admission\.namespaces: "):
        from_plain({**values, "admission": {**values["admission"], "namespaces": "all"}})

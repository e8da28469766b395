"""``topoproxy version``."""

from __future__ import annotations

import json
import platform

from click.testing import CliRunner

from proxy import __version__
from proxy.cli.version import version


def test_the_version_is_printed_as_text_and_json() -> None:
    assert CliRunner().invoke(version).output == f"topoproxy {__version__}\n"
    facts = json.loads(CliRunner().invoke(version, ["--json"]).output)
    assert (facts["name"], facts["version"], facts["python"]) == (
        "topoproxy",
        __version__,
        platform.python_version(),
    )

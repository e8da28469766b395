"""Objects of a chart, rendered by helm."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml


def render(
    helm: str,
    chart: Path,
    tmp_path: Path,
    *,
    namespace: str = "kube-system",
    release: str = "rel",
    kubernetes: str = "1.34.0",
    **changed: object,
) -> subprocess.CompletedProcess[str]:
    """Render a chart with some values that are not its own."""
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(changed))
    command = [helm, "template", release, str(chart), "--namespace", namespace, "--kube-version", kubernetes]
    return subprocess.run(
        [*command, "--values", str(tmp_path / "values.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def rendered(helm: str, chart: Path, tmp_path: Path, **changed: Any) -> list[dict[str, Any]]:
    """Return the objects of a chart."""
    done = render(helm, chart, tmp_path, **changed)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]

"""The bill of materials, the checksums, and the one place of the version."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import build
import pytest
import sbom

import proxy

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements-cluster.lock").read_text()


def test_the_bill_names_every_package_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "a.deb").write_bytes(b"x")
    text = sbom.document("1.2.3", LOCK, [tmp_path / "a.deb"], 0, ["libc6_2.36-9_amd64"])
    assert text == sbom.document("1.2.3", LOCK, [tmp_path / "a.deb"], 0, ["libc6_2.36-9_amd64"])
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    names = {each["name"] for each in bill["components"]}
    pinned = {line.partition("==")[0] for line in LOCK.splitlines() if "==" in line and "win32" not in line}
    assert pinned
    assert names == {*pinned, "libc6", "a.deb"}
    refs = [each["bom-ref"] for each in bill["components"]]
    assert len(refs) == len(set(refs))
    (file,) = [each for each in bill["components"] if each["type"] == "file"]
    assert file["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"x").hexdigest()}]


@pytest.mark.timeout(300)
def test_wheel_and_source_are_built_with_checksums_and_a_bill(tmp_path: Path) -> None:
    def build(out: Path) -> dict[str, bytes]:
        command = [sys.executable, "packages/build.py", "--out", str(out), "python", "helm"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
        return {path.name: path.read_bytes() for path in out.iterdir()}

    files = build(tmp_path / "a")
    sums = [line.split("  ") for line in files.pop("SHA256SUMS").decode().splitlines()]
    assert {name: digest for digest, name in sums} == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()
    }
    assert f"topoproxy-{proxy.__version__}-py3-none-any.whl" in files
    assert f"topoproxy-{proxy.__version__}.tar.gz" in files
    again = build(tmp_path / "b")
    again.pop("SHA256SUMS")
    assert again == files


@pytest.mark.parametrize("script", [None, "#!/bin/sh\necho 'fatal: dubious ownership' >&2; exit 128\n"])
def test_sources_whose_commit_cannot_be_read_are_packaged_with_the_earliest_time(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if script is not None:
        (tmp_path / "git").write_text(script)
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + (":/bin" if script else ""))
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert build.source_date_epoch() == build.EARLIEST
    printed = capsys.readouterr().err
    assert "make package: cannot read the time of the last commit" in printed
    assert ("dubious ownership" if script else "No such file or directory") in printed


def test_the_version_is_that_of_the_newest_release_of_the_changelog() -> None:
    found = re.search(r"(?m)^## \[([0-9.]+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text())
    assert found is not None
    assert found[1] == proxy.__version__

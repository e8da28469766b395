"""The bill of materials in CycloneDX's JSON format: packages of a lock file, and the files of a release."""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

_PIN = re.compile(r"(?m)^([A-Za-z0-9._-]+)==([^ \\;]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def document(version: str, lock: str, artifacts: Iterable[Path], epoch: int, base: Iterable[str] = ()) -> str:
    """Return the document.

    Args:
        version: topoproxy's version.
        lock: The text of the lock file from which the packages are built.
        artifacts: The files that are released.
        epoch: The time that it names.
        base: Debian packages of the image, as NAME_VERSION_ARCH.
    """
    components = [*_python(lock), *map(_debian, sorted(base)), *map(_file, sorted(artifacts))]
    seed = json.dumps(components, sort_keys=True)
    body = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'topoproxy {version} {seed}')}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "component": {
                "type": "application",
                "bom-ref": "topoproxy",
                "name": "topoproxy",
                "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": f"pkg:pypi/topoproxy@{version}",
            },
        },
        "components": components,
    }
    return json.dumps(body, indent=1) + "\n"


def _python(lock: str) -> Iterable[dict[str, object]]:
    for block in re.split(r"(?m)^(?=[A-Za-z])", lock):
        found = _PIN.match(block)
        if found and "sys_platform == 'win32'" not in block.splitlines()[0]:
            purl = f"pkg:pypi/{found[1]}@{found[2]}"
            # One of these hashes is that of the contained file; which one depends on machine and Python.
            hashes = [{"name": "lock:sha256", "value": value} for value in _HASH.findall(block)]
            yield {
                "type": "library",
                "bom-ref": purl,
                "name": found[1],
                "version": found[2],
                "purl": purl,
                "properties": hashes,
            }


def _debian(name: str) -> dict[str, object]:
    package, version, arch = name.split("_")
    purl = f"pkg:deb/debian/{package}@{version}?arch={arch}"
    return {"type": "library", "bom-ref": purl, "name": package, "version": version, "purl": purl}


def _file(path: Path) -> dict[str, object]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "type": "file",
        "bom-ref": path.name,
        "name": path.name,
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }

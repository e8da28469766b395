from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.topology.cdi import CdiDevice, CdiSpecs
from tests.testkit.captured_log import report

YAML = """\
# made by a vendor's tool
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      major: 195
    - {path: /dev/inside, hostPath: /dev/dri/card1}
- name: 1
  containerEdits:
    deviceNodes: &nodes [{path: /dev/nvidia1}, {path: relative}, {hostPath: ""}, text]
- name: GPU-8f
  containerEdits:
    deviceNodes: *nodes
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
"""


class Directories:
    """Two directories of specs, and the messages that were logged."""

    def __init__(self, root: Path) -> None:
        self.static, self.dynamic = root / "etc", root / "run"
        self.static.mkdir()
        self.dynamic.mkdir()
        self.complaints: list[str] = []
        self.specs = CdiSpecs((self.static, self.dynamic), report(self.complaints))

    def paths(self, name: str) -> tuple[str, ...] | None:
        device = self.specs.device(name)
        return None if device is None else device.paths


@pytest.fixture
def directories(tmp_path: Path) -> Directories:
    return Directories(tmp_path)


def spec(kind: str = "a.com/b", **devices: str) -> str:
    nodes = {name: {"deviceNodes": [{"path": path}]} for name, path in devices.items()}
    listed = [{"name": name, "containerEdits": edits} for name, edits in nodes.items()]
    return json.dumps({"cdiVersion": "0.6.0", "kind": kind, "devices": listed})


def test_yaml_with_everything_that_vendors_write(directories: Directories) -> None:
    file = directories.static / "nvidia.yaml"
    file.write_text(YAML)
    assert directories.specs.device("nvidia.com/gpu=0") == CdiDevice(
        ("/dev/nvidia0", "/dev/dri/card1"), str(file)
    )
    assert (
        directories.paths("nvidia.com/gpu=1")
        == directories.paths("nvidia.com/gpu=GPU-8f")
        == ("/dev/nvidia1",)
    )
    assert directories.specs.device("nvidia.com/gpu=2") is None
    assert directories.specs.device("0") is None
    assert directories.complaints == []


def test_json_and_a_claim_of_a_dra_driver(directories: Directories) -> None:
    (directories.dynamic / "k8s.gpu.example.com-claim.json").write_text(
        spec("k8s.gpu.example.com/claim", c1="/dev/x0")
    )
    assert directories.paths("k8s.gpu.example.com/claim=c1") == ("/dev/x0",)


def test_a_device_without_device_files_is_known(directories: Directories) -> None:
    (directories.static / "a.json").write_text(
        '{"kind": "a.com/b", "devices": [{"name": "x"}, {"name": ""}, 7]}'
    )
    assert directories.paths("a.com/b=x") == ()
    assert directories.paths("a.com/b=") is None


def test_the_later_directory_wins(directories: Directories) -> None:
    (directories.dynamic / "z.json").write_text(spec(x="/dev/dynamic"))
    (directories.static / "a.json").write_text(spec(x="/dev/static", y="/dev/only"))
    assert directories.paths("a.com/b=x") == ("/dev/dynamic",)
    assert directories.paths("a.com/b=y") == ("/dev/only",)
    assert directories.complaints == []
    (directories.dynamic / "z.json").unlink()
    assert directories.paths("a.com/b=x") == ("/dev/static",)


def test_a_name_defined_twice_in_a_directory_is_ignored(directories: Directories) -> None:
    (directories.static / "a.json").write_text(spec(x="/dev/a", y="/dev/y"))
    (directories.static / "b.json").write_text(spec(x="/dev/b"))
    (directories.static / "c.json").write_text(spec(x="/dev/c"))
    assert directories.paths("a.com/b=x") is None
    assert directories.paths("a.com/b=y") == ("/dev/y",)
    a, b = directories.static / "a.json", directories.static / "b.json"
    assert directories.complaints == [
        f'two CDI specs name the same device: it is ignored device="a.com/b=x" path={b} other={a}'
    ]


def test_specs_are_read_once_and_again_when_they_change(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = os.open

    def noted(path: str, flags: int) -> int:
        opened.append(path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", noted)
    one, two = directories.static / "a.json", directories.static / "b.json"
    one.write_text(spec(x="/dev/a"))
    two.write_text(spec(y="/dev/b"))
    for _ in range(3):
        assert directories.paths("a.com/b=x") == ("/dev/a",)
    assert opened == [str(one), str(two)]
    two.write_text(spec(y="/dev/longer"))
    assert directories.paths("a.com/b=y") == ("/dev/longer",)
    assert opened[2:] == [str(two)]


NESTED_YAML = "kind: " + "[" * 300_000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "Expecting property name"),
        ("a.json", "[" * 100_000, "recursion"),
        ("a.json", "[]", "no kind such as"),
        ("a.json", '{"devices": []}', "no kind such as"),
        ("a.json", '{"kind": "gpu", "devices": []}', "no kind such as"),
        ("a.json", '{"kind": "a.com/b"}', "no list of devices"),
        ("a.json", "\udcff", "can't decode"),
        ("a.yaml", "", "no kind such as"),
        ("a.yaml", "a: [", "did not find expected|expected the node content"),
        ("a.yaml", "a: b: c", "not allowed"),
        ("a.yaml", NESTED_YAML, "nested deeper than 32 levels"),
        ("a.yaml", "kind: *gone", "has no anchor"),
        ("a.yaml", "kind: \x01", "control characters|not allowed"),
        ("a.yaml", f"# {'x' * (1 << 20)}\n{YAML}", "larger than 1 MiB"),
    ],
)
def test_an_invalid_file_is_reported_once_and_skipped(
    directories: Directories, name: str, text: str, message: str
) -> None:
    file = directories.static / name
    file.write_bytes(text.encode(errors="surrogateescape"))
    (directories.static / "good.json").write_text(spec(x="/dev/a"))
    for _ in range(2):
        assert directories.paths("a.com/b=x") == ("/dev/a",)
    (complaint,) = directories.complaints
    assert complaint.startswith(f"cannot read a CDI spec path={file} err=")
    assert "\n" not in complaint
    assert re.search(message, complaint)
    (directories.static / "other.json").write_text(spec(y="/dev/b"))
    assert directories.paths("a.com/b=y") == ("/dev/b",)
    assert len(directories.complaints) == 1
    file.write_text("{")
    directories.paths("a.com/b=x")
    assert len(directories.complaints) == 2


def test_a_file_of_the_largest_size_is_read(directories: Directories) -> None:
    text = spec(x="/dev/a")
    (directories.static / "a.json").write_text(text + " " * ((1 << 20) - len(text)))
    assert directories.paths("a.com/b=x") == ("/dev/a",)


def test_other_files_are_not_opened(directories: Directories) -> None:
    (directories.static / "a.yml").write_text("{")
    (directories.static / "b.json.bak").write_text("{")
    (directories.static / "directory.json").mkdir()
    (directories.static / "link.json").symlink_to("gone")
    os.mkfifo(directories.static / "pipe.json")
    assert directories.paths("a.com/b=x") is None
    assert directories.complaints == []


def test_missing_directories_may_appear_later(tmp_path: Path) -> None:
    specs = CdiSpecs((tmp_path / "a", tmp_path / "b"), lambda message, **keys: pytest.fail(message))
    assert specs.device("a.com/b=x") is None
    (tmp_path / "b").mkdir()
    (tmp_path / "b/x.json").write_text(spec(x="/dev/a"))
    assert specs.device("a.com/b=x") is not None


def test_of_too_many_files_those_with_precedence_are_read(directories: Directories) -> None:
    (directories.static / "first.json").write_text(spec(first="/dev/first"))
    for number in range(600):
        text = spec(**{f"x{number}": "/dev/x"}) if number in (0, 499, 500) else spec()
        (directories.dynamic / f"{number:03}.json").write_text(text)
    assert directories.paths("a.com/b=x499") == ("/dev/x",)
    assert directories.paths("a.com/b=x500") is None
    assert directories.paths("a.com/b=first") is None
    assert directories.complaints == ["cannot read all CDI specs: there are too many limit=499"]


def test_lists_of_thousands_are_truncated(directories: Directories) -> None:
    edits = {"deviceNodes": [{"path": f"/dev/n{number}"} for number in range(300)]}
    devices = [
        {"name": str(number), "containerEdits": edits if number == 0 else {}} for number in range(2100)
    ]
    (directories.static / "a.json").write_text(json.dumps({"kind": "a.com/b", "devices": devices}))
    assert len(directories.paths("a.com/b=0") or ()) == 256
    assert directories.paths("a.com/b=2047") == ()
    assert directories.paths("a.com/b=2048") is None


def test_yaml_is_read_after_the_daemon_unloaded_its_module(tmp_path: Path) -> None:
    """The C part of yaml stays loaded, and refers only to the removed classes, also those of its errors."""
    (tmp_path / "a.yaml").write_text(YAML)
    (tmp_path / "b.yaml").write_text("a: [")
    code = """
import sys
from pathlib import Path
import yaml
yaml.safe_load("a: 1")
from proxy.memory_trim import drop_start_only_modules
drop_start_only_modules()
assert "yaml" not in sys.modules
from proxy.topology.cdi import CdiSpecs
messages = []
specs = CdiSpecs((Path(sys.argv[1]),), lambda message, **keys: messages.append(message))
print(specs.device("nvidia.com/gpu=0").paths, len(messages))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "('/dev/nvidia0', '/dev/dri/card1') 1\n"


def test_yaml_is_not_loaded_for_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(spec(x="/dev/a"))
    code = """
import sys
from pathlib import Path
from proxy.topology.cdi import CdiSpecs
print(CdiSpecs((Path(sys.argv[1]),)).device("a.com/b=x").paths, "yaml" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "('/dev/a',) False\n"

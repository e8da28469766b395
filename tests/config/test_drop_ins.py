"""The drop-in directory: which files are read, in which order, how they are merged, and error messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.config import Config, load
from proxy.config.load import MOST_FILES, distrust
from proxy.model.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "config.d").mkdir(mode=0o755)
    return tmp_path / "config.yaml"


def add(file: Path, name: str, text: str) -> Path:
    path = file.parent / "config.d" / name
    path.write_text(text)
    return path


def refused(file: Path, *, trusted: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, trusted=trusted)
    return str(caught.value)


def test_later_names_win_key_by_key(file: Path) -> None:
    file.write_text("callTimeout: 1s\nlog: {level: debug, format: klog}\nonError: refuse\n")
    add(file, "20-b.yaml", "callTimeout: 3s\nlog: {format: json}\n")
    add(file, "10-a.yaml", "callTimeout: 2s\nsettle: {perSecond: 4}\n")
    config = load(file)
    assert (config.call_timeout, config.on_error, config.settle.per_second) == (3, "refuse", 4)
    assert (config.log.level, config.log.format) == ("debug", "json")
    assert config.source == f"{file} with config.d/10-a.yaml, 20-b.yaml"


def test_maps_are_merged_and_lists_are_replaced(file: Path) -> None:
    file.write_text(
        "cpuManagerPolicy: static\n"
        "cpuManagerPolicyOptions: {full-pcpus-only: true}\n"
        "admission: {namespaces: [a, b]}\n"
        "hooks: {settings: {10-a: {timeout: 1s, config: {x: 1, list: [1, 2]}}, 20-b: {timeout: 2s}}}\n"
    )
    add(
        file,
        "1.yaml",
        "cpuManagerPolicyOptions: {align-by-socket: true}\n"
        "admission: {namespaces: [c]}\n"
        "hooks: {settings: {10-a: {config: {y: 2, list: [3]}}, 30-c: {failurePolicy: Fail}}}\n",
    )
    config = load(file)
    options = config.cpu_manager_policy_options
    assert (options.full_pcpus_only, options.align_by_socket) == (True, True)
    assert config.admission.namespaces.patterns == ("c",)
    settings = config.hooks.settings
    assert list(settings) == ["10-a", "20-b", "30-c"]
    assert settings["10-a"].timeout == 1
    assert settings["10-a"].config == {"x": 1, "y": 2, "list": (3,)}


def test_other_files_are_ignored(file: Path) -> None:
    file.write_text("callTimeout: 1s\n")
    for name in (".10-hidden.yaml", "10-a.yaml~", "10-a.yml", "10-a.yaml.dpkg-old", "README"):
        add(file, name, "callTimeout: 2s\n")
    config = load(file)
    assert (config.call_timeout, config.source) == (1, str(file))


def test_drop_ins_without_a_file(file: Path) -> None:
    """The default file may be missing, a file named on the command line may not."""
    assert load(None, file) == Config()
    add(file, "a.yaml", "callTimeout: 2s\n")
    add(file, "empty.yaml", "# nothing\n")
    assert load(None, file).call_timeout == 2
    assert "there is no such file" in refused(file)


def test_errors_name_file_and_line(file: Path) -> None:
    file.write_text("\ncallTimeout: soon\n")
    add(file, "a.yaml", "moed: observe\ncallTimeout: 1s\n")
    add(file, "b.yaml", "hooks:\n  settings:\n    x: {timeuot: 1s}\n")
    add(file, "c.yaml", "log: [\n")
    lines = refused(file).splitlines()
    assert lines[0] == f"cannot use the configuration {file}: 4 problems:"
    assert lines[1].startswith("  config.yaml, line 2: callTimeout: ")
    assert lines[2] == "  config.d/a.yaml, line 1: moed: unknown key; did you mean mode?"
    assert lines[3].startswith(
        "  config.d/b.yaml, line 3: hooks.settings.x.timeuot: unknown key; did you mean"
    )
    assert lines[4].startswith("  config.d/c.yaml, line 2: not YAML")


def test_valid_files_that_contradict_each_other_are_refused(file: Path) -> None:
    file.write_text("cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: true}\n")
    add(file, "a.yaml", "cpuManagerPolicyOptions: {distribute-cpus-across-cores: true}\n")
    what = refused(file)
    assert "full-pcpus-only" in what
    assert "config.d/a.yaml, line 1" in what


def test_owners_and_permissions_are_checked_as_for_the_file(file: Path) -> None:
    file.write_text("callTimeout: 1s\n")
    file.chmod(0o600)
    path = add(file, "a.yaml", "callTimeout: 2s\n")
    path.chmod(0o600)
    assert load(file, trusted=True).call_timeout == 2
    path.chmod(0o666)
    assert f"cannot trust the configuration {path}: {path} can be written by" in refused(file, trusted=True)
    assert str(path) in distrust(file)
    path.chmod(0o600)
    path.parent.chmod(0o777)
    assert f"the directory {path.parent} can be written by" in refused(file, trusted=True)
    path.parent.chmod(0o755)
    assert distrust(file) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_drop_in_of_another_user_is_not_trusted(file: Path) -> None:
    file.write_text("callTimeout: 1s\n")
    path = add(file, "a.yaml", "callTimeout: 2s\n")
    os.chown(path, 65534, 65534)
    assert "is owned by user 65534" in refused(file, trusted=True)


def test_a_directory_that_cannot_be_used(file: Path) -> None:
    file.write_text("callTimeout: 1s\n")
    for number in range(MOST_FILES + 1):
        add(file, f"{number}.yaml", "")
    assert f"it has more than {MOST_FILES} files" in refused(file)
    for path in (file.parent / "config.d").iterdir():
        path.unlink()
    (file.parent / "config.d/a.yaml").mkdir()
    assert "config.d/a.yaml: Is a directory" in refused(file)
    (file.parent / "config.d/a.yaml").rmdir()
    (file.parent / "config.d").rmdir()
    (file.parent / "config.d").write_text("a file")
    assert "config.d: Not a directory" in refused(file)

"""Files that other users could write or read: a configuration is refused, other files are reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli.check_config import check_config
from proxy.cli.serve import serve
from proxy.config import Config, load, parse
from proxy.config.files import exposed_files
from proxy.config.load import distrust
from proxy.model.errors import ConfigError
from proxy.open_file import open_file

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to others")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir(mode=0o755)
    made = tmp_path / "etc/config.yaml"
    made.write_text("mode: observe\n")
    made.chmod(0o644)
    return made


def reason(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, trusted=True)
    assert caught.value.exit_code == 78
    message = str(caught.value)
    assert message.startswith(f"cannot trust the configuration {file}: ")
    return message.partition(": ")[2]


def test_a_file_that_only_root_can_write_is_used(file: Path) -> None:
    assert load(file, trusted=True).mode == "observe"
    assert distrust(file) == ""


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (0o666, "can be written by its group and others (mode 0666): chmod go-w"),
        (0o664, "can be written by its group (mode 0664): chmod g-w"),
        (0o646, "can be written by others (mode 0646): chmod o-w"),
    ],
)
def test_a_file_that_others_can_write_is_refused(file: Path, mode: int, message: str) -> None:
    file.chmod(mode)
    assert reason(file) == f"{file} {message} {file}"
    assert distrust(file) == reason(file)
    assert load(file).mode == "observe"  # commands that only read the file


def test_a_directory_that_others_can_write_is_refused_unless_sticky(file: Path) -> None:
    file.parent.chmod(0o777)
    assert reason(file) == (
        f"the directory {file.parent} can be written by its group and others (mode 0777): "
        f"chmod go-w {file.parent}"
    )
    file.parent.chmod(0o1777)
    assert load(file, trusted=True).mode == "observe"


@as_root
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 1234, 0)
    assert reason(file) == f"{file} is owned by user 1234: chown root {file}"


@as_root
def test_a_link_through_another_users_directory_is_refused(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "link.yaml").symlink_to(file)
    (tmp_path / "config.yaml").symlink_to(other / "link.yaml")
    assert load(tmp_path / "config.yaml", trusted=True).mode == "observe"
    os.chown(other, 1234, 0)
    assert (
        reason(tmp_path / "config.yaml") == f"the directory {other} is owned by user 1234: chown root {other}"
    )


def test_a_file_is_checked_where_it_was_opened(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that replaces it at the path later is not used."""
    file.chmod(0o666)

    def open_and_replace(path: Path) -> object:
        stream = open_file(path)
        file.unlink()
        file.write_text("mode: enforce\n")
        file.chmod(0o600)
        return stream

    monkeypatch.setattr(sys.modules["proxy.config.load"], "open_file", open_and_replace)
    assert "can be written by its group and others" in reason(file)


def test_a_pipe_is_read(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"mode: observe\n")
    os.close(write)
    assert load(Path(f"/dev/fd/{read}"), trusted=True).mode == "observe"
    os.close(read)


def test_serve_refuses_it(file: Path) -> None:
    file.chmod(0o666)
    done = CliRunner().invoke(serve, ["--config", str(file)])
    assert isinstance(done.exception, ConfigError)
    assert "chmod go-w" in str(done.exception)


def checked(file: Path) -> str:
    done = CliRunner().invoke(check_config, ["--config", str(file)])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.stdout


@as_root
def test_check_config_refuses_the_file_as_the_daemons_user(file: Path) -> None:
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod go-w"):
        checked(file)


def test_check_config_warns_another_user(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o666)
    monkeypatch.setattr("proxy.cli.check_config.os.geteuid", lambda: 1000)
    assert "# note: serve refuses this file as it is: " in checked(file)


@pytest.fixture
def kubelet(file: Path) -> Callable[..., Config]:
    """Make a configuration that names a token, a key and an authority, each with a mode."""

    def make(**modes: int) -> Config:
        names = {"tokenFile": "token", "certFile": "cert", "keyFile": "key", "caFile": "ca"}
        text = "kubelet:\n  pods: https://127.0.0.1:10250\n"
        for key, name in names.items():
            path = file.parent / name
            path.write_text("x")
            path.chmod(modes.get(name, 0o600))
            text += f"  {key}: {path}\n"
        file.write_text(text)
        return parse(text, str(file))

    return make


def test_secrets_of_root_only_are_not_a_problem(kubelet: Callable[..., Config]) -> None:
    assert exposed_files(kubelet(ca=0o644, cert=0o644)) == []


@pytest.mark.parametrize(("name", "key"), [("token", "tokenFile"), ("key", "keyFile")])
def test_a_secret_that_others_can_read_is_reported(
    kubelet: Callable[..., Config], file: Path, name: str, key: str
) -> None:
    path = file.parent / name
    config = kubelet(**{name: 0o604})
    assert exposed_files(config) == [
        f"kubelet.{key}: {path} can be read by others (mode 0604): chmod o-r {path}"
    ]
    assert f"# note: {exposed_files(config)[0]}\n" in checked(file)


@as_root
def test_the_group_of_root_counts_as_root(kubelet: Callable[..., Config], file: Path) -> None:
    config = kubelet(token=0o640)
    assert exposed_files(config) == []
    os.chown(file.parent / "token", 0, 1234)
    assert "can be read by its group (mode 0640): chmod g-r" in exposed_files(config)[0]


def test_an_authority_that_others_can_write_is_reported(kubelet: Callable[..., Config], file: Path) -> None:
    """A replaced authority could sign the certificate of a server that then receives the token."""
    path = file.parent / "ca"
    config = kubelet(ca=0o666)
    assert exposed_files(config) == [
        f"kubelet.caFile: {path} can be written by its group and others (mode 0666): chmod go-w {path}"
    ]


def test_files_that_are_missing_are_left_to_their_readers(kubelet: Callable[..., Config], file: Path) -> None:
    config = kubelet(token=0o666)
    (file.parent / "token").unlink()
    assert exposed_files(config) == []

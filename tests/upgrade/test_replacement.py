"""What ``topoproxy upgrade --now`` reports if no process has replaced the daemon in time."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from proxy.model.errors import TopoproxyError, UnavailableError
from proxy.upgrade import replacement


@pytest.mark.parametrize("ends", [True, False])
def test_a_daemon_that_ended_too_is_not_reported_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    admin = tmp_path / "a"
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(admin))
        daemon.listen()

        def query(path: Path, route: str, *args: object, act: bool = False) -> object:
            if act and ends:
                daemon.close()
            return "preparing\n"

        monkeypatch.setattr(replacement, "query_admin", query)
        with pytest.raises(TopoproxyError) as error:
            replacement.replace_daemon(admin, 0.2)
    if ends:
        assert isinstance(error.value, UnavailableError)
        why = f"no process answers at {admin}: systemctl status topoproxy"
    else:
        assert not isinstance(error.value, UnavailableError)
        why = "it still runs"
    assert str(error.value) == f"cannot replace the daemon in 0.2 seconds: {why}"


@pytest.mark.parametrize("listens", [True, False])
def test_the_new_process_may_listen_at_another_admin_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """``adminSocket`` of the configuration has changed since the daemon was started."""
    admin, after = tmp_path / "a", tmp_path / "b"
    owners, queried = {admin: 1}, []

    def owner(path: Path) -> int:
        if path not in owners:
            raise UnavailableError("no process listens there")
        return owners[path]

    def query(path: Path, route: str, *args: object, act: bool = False) -> object:
        if act:
            owners.clear()
            owners.update({after: 2} if listens else {})
        queried.append((path, route))
        return {"ready": True}

    monkeypatch.setattr(replacement, "_listening_pid", owner)
    monkeypatch.setattr(replacement, "query_admin", query)
    if listens:
        assert replacement.replace_daemon(admin, 5, after=after) == replacement.Replacement(2)
        assert queried == [(admin, "/successor"), (after, "/status")]
        return
    with pytest.raises(UnavailableError, match=f"no process answers at {admin} or {after}: systemctl"):
        replacement.replace_daemon(admin, 0.2, after=after)

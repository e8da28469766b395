"""Reads the facts of a node for ``topoproxy upgrade --check``. Nothing is written; hook files are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from proxy.admin.client import query_admin
from proxy.backends.kubelet.small_file import read_small_file
from proxy.backends.ledger.file_ledger import LEDGER_FILE, LEDGER_LIMIT_BYTES
from proxy.backends.ledger.format import recover
from proxy.config import Config, override
from proxy.config.hooks import HooksConfig
from proxy.hooks.loader.directories import HookFileState, scan_directories
from proxy.hooks.loader.examination import check_file_in_child
from proxy.model.errors import PermissionDeniedError, TopologyError, TopoproxyError, UsageError
from proxy.observe.json_access import as_list, as_map
from proxy.public_interfaces import interface, settings, shipped_unit
from proxy.topology.reader import read_machine
from proxy.upgrade.checks import UpgradeFacts, unit_changes

UNITS = ("topoproxy.service", "topoproxy.socket")
UNIT_DIRECTORIES = tuple(map(Path, ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")))


def gather(
    config: Config,
    refused: str,
    socket: Path,
    timeout: float,
    running: Mapping[str, object] | None = None,
    directories: tuple[Path, ...] = UNIT_DIRECTORIES,
) -> UpgradeFacts:
    """Read everything.

    Args:
        config: The configuration as this version reads it; the defaults if it is refused.
        refused: Why this version refuses it; empty if it does not.
        socket: The daemon's admin socket.
        timeout: Seconds for the answer of the daemon.
        running: The interfaces of the running version; read from the daemon if None.
        directories: The directories of installed units, the one with the highest priority first.

    Raises:
        PermissionDeniedError: This user may not use the admin socket, or not read the ledger.
    """
    no_report_reason, queried = "", running is None
    if running is None:
        try:
            running = as_map(query_admin(socket, "/interface", timeout))
            if not isinstance(running.get("version"), str):
                running, no_report_reason = {}, f"the answer of the daemon at {socket} does not name it"
        except PermissionDeniedError:
            raise
        except TopoproxyError as error:
            running, no_report_reason = {}, str(error)
    if not refused:
        config, refused = _with_options(config, running)
    unusable = list(_unusable_hooks(config.hooks))
    broken = _broken_hooks(socket, timeout) if unusable and queried else set()
    return UpgradeFacts(
        running,
        no_report_reason,
        interface(config),
        refused,
        _ledger(config),
        [why for path, why in unusable if path not in broken],
        [why for path, why in unusable if path in broken],
        _units(directories),
    )


def _broken_hooks(socket: Path, timeout: float) -> set[str]:
    """Return the hook files of which the running daemon uses no version, not even an older one."""
    try:
        rows = [as_map(row) for row in as_list(as_map(query_admin(socket, "/hooks", timeout)).get("hooks"))]
    except TopoproxyError:
        return set()
    return {
        str(row.get("path"))
        for row in rows
        if row.get("state") in (HookFileState.BROKEN, HookFileState.UNTRUSTED)
    }


def _unusable_hooks(config: HooksConfig) -> Iterator[tuple[str, str]]:
    """Return the hook files that cannot be used, and the reason; each is loaded in a child process."""
    for candidate in scan_directories(config).candidates.values():
        if known := candidate.distrust or candidate.cause:
            yield str(candidate.path), f"{candidate.path}: {known}"
        elif not candidate.server:
            page = check_file_in_child(candidate.path, config, trusted=True)
            if error := str(page["error"]):  # the error names the file
                yield str(candidate.path), error


def _with_options(config: Config, running: Mapping[str, object]) -> tuple[Config, str]:
    """Return the configuration with the running daemon's options, with which its successor is started.

    The second value is the reason why this version refuses an option; empty if it does not.
    """
    options = as_map(as_map(running.get("configuration")).get("options"))
    unknown = sorted(options.keys() - dict(settings(config)))
    if unknown:
        return config, f"the running daemon's options: {unknown[0]} is not a key"
    try:
        return override(config, {key: (f"the option for {key}", str(options[key])) for key in options}), ""
    except UsageError as error:
        return config, str(error)


def _ledger(config: Config) -> str | None:
    path = config.state_dir / LEDGER_FILE
    try:
        machine = read_machine(config.sysfs_root, config.procfs_root)
        refused = recover(read_small_file(str(path), LEDGER_LIMIT_BYTES)[0], machine.fingerprint).refused
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot read {path}: {error.strerror}") from error
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    except (ValueError, TopologyError) as error:
        return f"cannot read {path}: {error}"
    return f"{path} would not be used: {refused}" if refused else ""


def _units(directories: tuple[Path, ...]) -> dict[str, list[str]]:
    changed = {}
    for name in UNITS:
        path = next((each / name for each in directories if (each / name).is_file()), None)
        if path is not None:
            text = path.read_text("utf-8", "replace")
            changed[str(path)] = list(unit_changes(text, shipped_unit(name).read_text("utf-8")))
    return {name: lines for name, lines in changed.items() if lines}

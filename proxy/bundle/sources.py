"""The sources of a bundle, each read separately, and the archive for them."""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import json
import platform
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from proxy import __version__
from proxy.admin.client import query_admin
from proxy.atomic_write import write_file
from proxy.backends.kubelet.small_file import read_small_file
from proxy.backends.ledger.file_ledger import LEDGER_FILE
from proxy.backends.ledger.format import recover
from proxy.bundle.redaction import Redactor
from proxy.config import Config
from proxy.config.schema import API_VERSION
from proxy.config.show import as_mapping
from proxy.doctor.checks import examine
from proxy.doctor.gather import gather
from proxy.model.errors import CannotCreateError, TopoproxyError
from proxy.observe.json_access import as_list, as_map
from proxy.open_file import open_file
from proxy.topology.facts import machine_to_json
from proxy.topology.reader import read_machine

MEMBER_LIMIT = 8 << 20
"""The most bytes of one member. This also bounds all of them together, and the archive in memory."""
LEDGER_LIMIT = 64 << 20
"""The most bytes of a ledger that are read."""
LOG_LINES = 5000
LOG_S = 20.0
DECIDED_PODS = 100
DECISIONS_S = 20.0
"""For at most this long, decisions of at most this many pods are requested, the newest first."""
UNIT = "topoproxy.service"
_JOURNAL_TIME = re.compile(r"\d{1,11}\.\d{3} ")
"""Seconds since the epoch, before each record of the journal."""
PAGES = {
    "status.json": "/status",
    "hooks.json": "/hooks",
    "devices.json": "/devices",
    "enforcement.json": "/enforce",
    "metrics.txt": "/metrics",
}
"""The daemon's answers, by member."""
PACKAGES = (
    "cgroupspy",
    "click",
    "grpcio",
    "hpack",
    "jeepney",
    "loguru",
    "msgspec",
    "protobuf",
    "PyYAML",
    "lightkube",
)
_NAME_KEYS = (
    "id",
    "ref",
    "pod",
    "pod_uid",
    "sandbox",
    "sandbox_id",
    "container",
    "owner",
    "uid",
    "namespace",
    "name",
)


class BundleSettings(Struct, frozen=True):
    """The inputs of a bundle.

    Attributes:
        config: The configuration; the defaults if it is refused.
        refused: Why it is refused; empty if it is not.
        timeout: Seconds for each answer of the daemon.
        log: A file with the log; the journal if None.
        now: Seconds since the epoch.
    """

    config: Config
    refused: str
    timeout: float
    log: Path | None
    now: float


class BundleContent(Struct, frozen=True):
    """The content of a bundle.

    Attributes:
        members: The files by name, redacted, the manifest first.
        absent: Why files are missing, by name; not redacted, for the terminal.
        redacted: How many strings were replaced.
    """

    members: dict[str, bytes]
    absent: dict[str, str]
    redacted: int


class TextEnd(Struct, frozen=True):
    """The end of a text that is too long; it starts at the beginning of a line.

    Attributes:
        text: The end.
        size: Bytes of the whole text.
    """

    text: str
    size: int


class AbsentError(Exception):
    """A source does not exist; the message says why."""


def collect(settings: BundleSettings) -> BundleContent:
    """Read all sources, and redact them.

    Args:
        settings: Where to look.
    """
    redactor = Redactor(_paths(settings.config))
    raw: dict[str, object] = {}
    absent: dict[str, str] = {}
    for name, read in _sources(settings).items():
        try:
            raw[name] = read()
        except (AbsentError, TopoproxyError) as error:
            absent[name] = str(error)
        except Exception as error:  # noqa: BLE001 - a new fault in one source must not lose the others
            absent[name] = f"cannot be read: {type(error).__name__}"
    for source in (raw.get("status.json"), raw.get("ledger.json"), raw.get("decisions.json")):
        redactor.add_names(_names(source))
    members, cut = {}, {}
    for name, content in raw.items():
        text, whole = (content.text, content.size) if isinstance(content, TextEnd) else (content, 0)
        members[name], before = _bounded(_redacted(redactor, name, text), tail=name == "log.txt")
        if whole or before:
            cut[name] = whole or before
    manifest = {
        "format": 1,
        "topoproxy": __version__,
        "created": int(settings.now),
        "members": {name: len(content) for name, content in members.items()},
        "absent": {name: redactor.redact_text(why) for name, why in absent.items()},
        "cut": cut,
        "configuration": redactor.redact_text(settings.refused),
        "redacted": redactor.replaced,
    }
    return BundleContent({"manifest.json": _json(manifest), **members}, absent, redactor.replaced)


def _sources(settings: BundleSettings) -> dict[str, Callable[[], object]]:
    config = settings.config

    def page(route: str) -> Callable[[], object]:
        return lambda: query_admin(config.admin_path, route, settings.timeout)

    return {
        "versions.json": versions,
        "configuration.json": lambda: as_mapping(config),
        "topology.json": lambda: machine_to_json(read_machine(config.sysfs_root, config.procfs_root)),
        "doctor.json": lambda: _doctor(settings),
        "ledger.json": lambda: _ledger(config),
        "decisions.json": lambda: _decisions(settings),
        **{name: page(route) for name, route in PAGES.items()},
        "log.txt": lambda: _log(settings.log),
    }


def versions() -> dict[str, object]:
    """Return the versions of topoproxy and of the software that it runs on."""
    versions_by_name: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions_by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "topoproxy": __version__,
        "configuration": API_VERSION,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "packages": versions_by_name,
    }


def _doctor(settings: BundleSettings) -> list[dict[str, object]]:
    findings = examine(gather(settings.config, settings.refused, settings.timeout), ())
    return [finding.data() for finding in findings]


def _decisions(settings: BundleSettings) -> dict[str, object]:
    path, end = settings.config.admin_path, time.monotonic() + DECISIONS_S
    known = as_map(query_admin(path, "/explain", settings.timeout))
    pods = [as_map(row) for row in as_list(known.get("pods"))]
    newest = sorted(pods, key=lambda pod: str(pod.get("when")), reverse=True)
    records: list[object] = []
    for pod in newest[:DECIDED_PODS]:
        if time.monotonic() > end:
            break
        answer = as_map(query_admin(path, "/explain", settings.timeout, {"query": str(pod.get("uid"))}))
        records += as_list(answer.get("records"))
    return {**known, "records": records}


def _ledger(config: Config) -> dict[str, object]:
    path = config.state_dir / LEDGER_FILE
    try:
        content = read_small_file(str(path), LEDGER_LIMIT)[0]
    except OSError as error:
        raise AbsentError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise AbsentError(f"cannot read {path}: {error}") from error
    # A ledger of another machine is described too: it is read as if this were that machine.
    recovered = recover(content, _machine_of(content))
    if recovered.refused:
        raise AbsentError(f"{path} is not used: {recovered.refused}")
    return {"bytes": len(content), "cut_bytes": recovered.cut_bytes, "entries": recovered.entries}


def _machine_of(ledger: bytes) -> str:
    """Return the machine that the first line names; empty if it names none."""
    try:
        return str(as_map(json.loads(ledger.partition(b"\n")[0][9:])).get("machine", ""))
    except (ValueError, RecursionError):
        return ""


def _log(file: Path | None) -> str | TextEnd:
    if file is not None:
        try:
            with open_file(file) as opened:
                size = opened.seek(0, 2)
                opened.seek(max(0, size - MEMBER_LIMIT))
                content = opened.read(MEMBER_LIMIT)
        except OSError as error:
            raise AbsentError(f"cannot read {file}: {error.strerror}") from error
        if size <= MEMBER_LIMIT:
            return content.decode("utf-8", "replace")
        return TextEnd(_whole_lines(content).decode("utf-8", "replace"), size)
    command = ["journalctl", "--unit", UNIT, "--lines", str(LOG_LINES), "--output", "json", "--no-pager"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LOG_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AbsentError(f"journalctl does not answer: {type(error).__name__}") from error
    if done.returncode or not done.stdout.strip():
        raise AbsentError(f"the journal has no record of {UNIT}")
    return "\n".join(_journal(done.stdout.decode("utf-8", "replace")))


def _journal(text: str) -> Iterator[str]:
    """Return time and message of each record: not the name of the host, nor the command line."""
    for line in text.splitlines():
        try:
            record = as_map(json.loads(line))
        except ValueError:
            continue
        message, stamp = record.get("MESSAGE"), str(record.get("__REALTIME_TIMESTAMP", ""))
        if isinstance(message, str):
            yield f"{int(stamp) / 1e6:.3f} {message}" if stamp.isdigit() else message


def _redacted(redactor: Redactor, name: str, content: object) -> bytes:
    if name == "versions.json":
        return _json(content)
    if not isinstance(content, str):
        return _json(redactor.redact_value(content))
    lines = (_line(redactor, line) for line in content.splitlines())
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _line(redactor: Redactor, line: str) -> str:
    """Redact a line of the log: in the JSON format by its keys, otherwise by its words.

    A line from the journal begins with the time (``_journal``).
    """
    stamp = _JOURNAL_TIME.match(line)
    start, record = (line[: stamp.end()], line[stamp.end() :]) if stamp else ("", line)
    if record.startswith("{"):
        try:
            return start + json.dumps(redactor.redact_fields(json.loads(record)), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return start + redactor.redact_record(record)


def _whole_lines(content: bytes) -> bytes:
    """Return the content after the first line, whose beginning is missing."""
    return content.partition(b"\n")[2]


def _bounded(content: bytes, *, tail: bool) -> tuple[bytes, int]:
    """Cut a member that is too long: keep the end of the log, and the beginning of other members.

    Returns:
        The member, and its size before; 0 if it was not cut.
    """
    if len(content) <= MEMBER_LIMIT:
        return content, 0
    return _whole_lines(content[-MEMBER_LIMIT:]) if tail else content[:MEMBER_LIMIT], len(content)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n").encode("utf-8", "replace")


def _paths(config: Config) -> Iterator[str]:
    """Return the paths of the configuration; they are not redacted in texts."""
    paths = (config.listen, config.runtime, config.admin_path, config.state_dir, config.kubelet.state_dir)
    for path in (*paths, config.sysfs_root, config.procfs_root, config.cgroup_root, config.hooks.directory):
        yield str(path)
    yield config.source
    yield str(config.state_dir / LEDGER_FILE)
    yield sys.prefix


def _names(value: object) -> Iterator[object]:
    """Return the names of pods and containers in an answer or in the ledger."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key in _NAME_KEYS:
                yield part
            if key not in ("labels", "annotations"):
                yield from _names(part)
    elif isinstance(value, list):
        for part in as_list(value):
            yield from _names(part)


MODE = 0o600


def pack(directory: str, members: Mapping[str, bytes], now: float) -> bytes:
    """Return the archive.

    Args:
        directory: The one directory in it, which holds all members.
        members: Contents by file name.
        now: The time of all files, in seconds since the epoch.
    """
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=int(now)) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in members.items():
            entry = tarfile.TarInfo(f"{directory}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), MODE, int(now)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write_bundle(path: Path, data: bytes) -> None:
    """Write a bundle with mode 0600; an existing file is not replaced.

    Raises:
        CannotCreateError: It cannot be written, or the file exists.
    """
    try:
        write_file(path, data, mode=MODE, overwrite=False)
    except FileExistsError as error:
        raise CannotCreateError(f"cannot write the bundle {path}: the file exists") from error
    except OSError as error:
        raise CannotCreateError(f"cannot write the bundle {path}: {error.strerror or error}") from error

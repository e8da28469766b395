"""Checks before an upgrade or a downgrade: pure functions on what each version reports of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from proxy.doctor.checks import CheckResult, Finding
from proxy.observe.json_access import as_list, as_map

SHOWN_NAMES = 8
"""How many keys, names or lines a finding shows."""
HOOKS_ADVICE = "topoproxy hooks validate has details"
OK, WARN, FAIL, SKIP = CheckResult.OK, CheckResult.WARN, CheckResult.FAIL, CheckResult.SKIP


class UpgradeFacts(Struct, frozen=True):
    """The facts that are compared.

    Attributes:
        running: The running daemon's report about itself (``/interface``); empty if there is none.
        no_report_reason: Why there is no report.
        installed: The same report of this version, with the configuration as this version reads it.
        refused: Why this version refuses the configuration; empty if it does not.
        ledger: Why this version does not use the ledger; empty if it does. None if there is no ledger.
        hooks: Hook files that this version cannot use but the running version may, with the reason.
        broken_hooks: Hook files that neither version can use, with the reason.
        units: Lines in which each installed unit differs from the one of this version, by name.
    """

    running: Mapping[str, object]
    no_report_reason: str
    installed: Mapping[str, object]
    refused: str = ""
    ledger: str | None = ""
    hooks: Sequence[str] = ()
    broken_hooks: Sequence[str] = ()
    units: Mapping[str, Sequence[str]] = {}


def examine(facts: UpgradeFacts) -> list[Finding]:
    """Make all checks, in their order."""
    return [finding(facts) for finding in CHECKS.values()]


def _version(facts: UpgradeFacts) -> Finding:
    installed = facts.installed["version"]
    if not facts.running:
        return Finding(
            "version",
            WARN,
            f"the running version is not known: {facts.no_report_reason}",
            "start the daemon, and repeat",
        )
    running = facts.running["version"]
    return Finding(
        "version",
        OK,
        f"{running} runs, this is {installed}" if running != installed else f"{installed} runs already",
    )


def _configuration(facts: UpgradeFacts) -> Finding:
    if facts.refused:
        return Finding(
            "configuration", FAIL, facts.refused, "change the configuration before this version starts"
        )
    return Finding("configuration", OK, "this version accepts the configuration")


def _keys(facts: UpgradeFacts) -> Finding:
    before, after = (_part(part, "defaults") for part in (facts.running, facts.installed))
    if not before:
        return Finding("configuration-keys", SKIP, "the running version does not report its keys")
    gone, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    parts = [f"{label} {_named(names)}" for label, names in (("removed:", gone), ("new:", new)) if names]
    if gone:
        return Finding(
            "configuration-keys",
            WARN,
            "; ".join(parts),
            "the changelog names what replaces a removed key",
        )
    return Finding("configuration-keys", OK, "; ".join(parts) or "the keys are the same")


def _values(facts: UpgradeFacts) -> Finding:
    before, after = (_part(part, "effective") for part in (facts.running, facts.installed))
    if not before or facts.refused:
        return Finding("configuration-values", SKIP, "the values cannot be compared")
    changed = [
        f"{key} {before[key] or 'empty'} -> {after[key] or 'empty'}"
        for key in sorted(before.keys() & after.keys())
        if before[key] != after[key]
    ]
    if changed:
        advice = "set these keys if they are to stay; a change that is not reloaded yet shows here, too"
        return Finding("configuration-values", WARN, f"will change: {_named(changed)}", advice)
    return Finding("configuration-values", OK, "every setting keeps its value")


def _ledger(facts: UpgradeFacts) -> Finding:
    running, installed = as_map(facts.running.get("ledger")), as_map(facts.installed.get("ledger"))
    if facts.ledger:
        return Finding(
            "ledger", FAIL, facts.ledger, "containers would be placed again from the list of the runtime"
        )
    if facts.ledger is None and not running:
        return Finding("ledger", SKIP, "there is no ledger")
    if not running:
        return Finding("ledger", OK, "this version reads the existing ledger")
    if running.get("writes") not in as_list(installed.get("reads")):
        text = f"it has format {running.get('writes')}, and this version reads {_formats(installed)}"
        return Finding("ledger", FAIL, text, "upgrade one release after the other")
    return Finding("ledger", OK, f"this version reads format {running.get('writes')}")


def _way_back(facts: UpgradeFacts) -> Finding:
    running, installed = as_map(facts.running.get("ledger")), as_map(facts.installed.get("ledger"))
    if not running:
        return Finding("way-back", SKIP, "the running version does not report which ledgers it reads")
    if installed.get("writes") not in as_list(running.get("reads")):
        text = f"this version writes format {installed.get('writes')}"
        text += f", and the running one reads {_formats(running)}"
        return Finding(
            "way-back", WARN, text, "after the upgrade there is no way back to the running version"
        )
    return Finding(
        "way-back", OK, f"the running version reads format {installed.get('writes')}, which this one writes"
    )


def _hooks(facts: UpgradeFacts) -> Finding:
    if facts.hooks:
        return Finding("hooks", FAIL, _named(facts.hooks), HOOKS_ADVICE)
    if facts.broken_hooks:
        text = f"the running version cannot use them either: {_named(facts.broken_hooks)}"
        return Finding("hooks", WARN, text, HOOKS_ADVICE)
    gone = {*as_list(facts.running.get("hooks"))} - {*as_list(facts.installed.get("hooks"))}
    if gone:
        return Finding(
            "hooks",
            OK,
            f"API version {_named(sorted(map(str, gone)))} is no longer supported, and no file uses it",
        )
    return Finding("hooks", OK, "this version can use all hook files")


def _units(facts: UpgradeFacts) -> Finding:
    lines = [f"{name}: {line}" for name, changed in facts.units.items() for line in changed]
    if lines:
        advice = "install the units of this version; your own changes belong in a drop-in"
        return Finding("units", WARN, _named(lines), advice)
    return Finding("units", OK, "the installed units are those of this version, or there are none")


def _outputs(facts: UpgradeFacts) -> Finding:
    gone = [
        str(name)
        for kind in ("answers", "metrics")
        for name in as_list(facts.running.get(kind))
        if name not in as_list(facts.installed.get(kind))
    ]
    if gone:
        return Finding("outputs", WARN, f"removed: {_named(gone)}", "change the programs that read them")
    if not facts.running:
        return Finding("outputs", SKIP, "the running version does not report its answers and metrics")
    return Finding("outputs", OK, "no JSON answer and no metric is removed")


CHECKS: dict[str, Callable[[UpgradeFacts], Finding]] = {
    "version": _version,
    "configuration": _configuration,
    "configuration-keys": _keys,
    "configuration-values": _values,
    "ledger": _ledger,
    "way-back": _way_back,
    "hooks": _hooks,
    "units": _units,
    "outputs": _outputs,
}
"""The checks by id, in their order. Ids never change."""


def unit_changes(installed: str, shipped: str) -> Iterator[str]:
    """Return the directives in which an installed unit differs, ignoring comments, empty lines and order."""
    before, after = (set(_directives(text)) for text in (installed, shipped))
    yield from (f"+{line}" for line in sorted(after - before))
    yield from (f"-{line}" for line in sorted(before - after))


def _directives(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith(("#", ";", "[")):
            yield line.strip()


def _part(whole: Mapping[str, object], name: str) -> Mapping[str, object]:
    return as_map(as_map(whole.get("configuration")).get(name))


def _formats(ledger: Mapping[str, object]) -> str:
    return ", ".join(map(str, as_list(ledger.get("reads"))))


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more

"""``topoproxy devices``: lists the devices of the machine, and the container that has each."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from proxy.cli.admin_query import config_for, query_daemon, query_options
from proxy.cli.settings import PATH, absolute_path
from proxy.model.errors import InputError, TopoproxyError, UsageError
from proxy.observe.json_access import as_list, as_map, cut, one_line, table

if TYPE_CHECKING:
    from proxy.config import Config
    from proxy.observe.device_list import DeviceList

UNKNOWN = "unknown"
_COLUMNS = ("DEVICE", "KIND", "NAMES", "NUMA", "L3", "MANAGER", "CONTAINER", "HEALTH")
_MOST_CACHES, _MOST_NAMES = 2, 30
"""Caches and characters of names in the table; the details of a device show all."""
_MOST_CONFLICTS = 5


@click.command("devices")
@click.argument("device", required=False)
@query_options(timeout=15.0)
@click.option(
    "--sysfs-root",
    type=PATH,
    help="Used in place of /sys: a machine other than that of the daemon, which is not queried then.",
)
@click.option("--procfs-root", type=PATH, help="Used in place of /proc.")
@click.option("--all", "everything", is_flag=True, help="Show bridges and other functions of the board too.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def devices(
    device: str | None,
    file: Path | None,
    admin: str | None,
    timeout: float,
    sysfs_root: Path | None,
    procfs_root: Path | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Show devices: their location, the manager that assigns them, and the container that has them.

    DEVICE is a PCI address, a CDI (Container Device Interface) name, an interface such as eth1, or an id or a
    resource of a device plugin: only such devices are shown, with all details.

    PCI functions and CDI devices are read here. Managers, containers, health and history come from the
    daemon, which queries kubelet (kubelet.podResources). Facts that no source knows are shown as unknown.
    """
    if device == "":
        raise UsageError("cannot show a device without a name")
    config = config_for(file, admin)
    page, problem = _daemon(config, timeout) if sysfs_root is None else ({}, "--sysfs-root is given")
    listed = _list(config, sysfs_root, procfs_root, page)
    answer = listed.as_json(all_functions=everything, daemon=problem, kubelet=as_map(page.get("kubelet")))
    if device is not None:
        shown = [entry for entry in map(as_map, as_list(answer["devices"])) if device in _known_as(entry)]
        if not shown:
            missing = _missing_source(answer)
            more = f" among those that are known. {missing}" if missing else ""
            raise InputError(f"cannot show the device {device}: there is no such device{more}")
        answer["devices"] = shown
    if as_json:
        click.echo(json.dumps(answer, indent=1, ensure_ascii=False))
        return
    entries = [as_map(entry) for entry in as_list(answer["devices"])]
    lines = _table(entries) if device is None else [line for entry in entries for line in _details(entry)]
    width = shutil.get_terminal_size((140, 24)).columns
    click.echo("\n".join([*(cut(line, width) for line in lines), *_notes(answer)]))


def _daemon(config: Config, timeout: float) -> tuple[Mapping[str, object], str]:
    """Query the daemon; if it does not answer, the machine is still shown."""
    try:
        return as_map(query_daemon(config, "/devices", timeout)), ""
    except TopoproxyError as error:
        return {}, str(error)


def _list(
    config: Config, sysfs_root: Path | None, procfs_root: Path | None, page: Mapping[str, object]
) -> DeviceList:
    from proxy.observe.device_list import DeviceList
    from proxy.topology.cdi import CDI_ROOTS
    from proxy.topology.devices import SysfsDevices
    from proxy.topology.pci import nvidia_addresses, pci_functions
    from proxy.topology.reader import read_machine, sysfs_of

    sysfs = sysfs_of(sysfs_root or config.sysfs_root)
    if procfs_root is None and sysfs_root is None:
        procfs_root = config.procfs_root
    elif procfs_root is None:
        procfs_root = Path(absolute_path("--sysfs-root", str(sysfs))).parent / "proc"
    specs = CDI_ROOTS if sysfs_root is None else ()  # this node's CDI files say nothing about another machine
    hardware = SysfsDevices(sysfs, cdi_roots=specs, procfs_root=procfs_root)
    machine = read_machine(sysfs, procfs_root)
    devices = DeviceList(machine, pci_functions(sysfs), hardware.locate_device, nvidia_addresses(procfs_root))
    devices.add_cdi(hardware.cdi_names())
    devices.add_daemon(page)
    return devices


def _known_as(device: Mapping[str, object]) -> set[str]:
    """Return all names of a device."""
    plugs = [as_map(each) for each in as_list(device.get("resources"))]
    named = [device.get("name"), *as_list(device.get("interfaces")), *as_list(device.get("cdi"))]
    named += [plug.get(key) for plug in plugs for key in ("resource", "id")]
    named += [f"{plug.get('resource')}={plug.get('id')}" for plug in plugs]
    return {str(name) for name in named}


# -- text -------------------------------------------------------------------------------------------------


def _table(devices: Iterable[Mapping[str, object]]) -> list[str]:
    rows = [
        (
            one_line(each.get("name")),
            one_line(each.get("kind")) or UNKNOWN,
            cut(_names(each), _MOST_NAMES) or "-",
            _numa(each),
            _caches(each, _MOST_CACHES),
            _managers(each),
            _holders(each),
            one_line(each.get("health")) or UNKNOWN,
        )
        for each in devices
    ]
    return table([_COLUMNS, *rows]) if rows else ["no devices"]


def _details(device: Mapping[str, object]) -> Iterable[str]:
    yield one_line(device.get("name"))
    yield f"  kind        {one_line(device.get('kind')) or UNKNOWN}"
    for function in map(as_map, as_list(device.get("pci"))):
        parts = [f"{key} {one_line(function[key])}" for key in ("class", "driver") if function.get(key)]
        parts += [f"{one_line(function.get('vendor'))}:{one_line(function.get('product'))}"]
        if function.get("physicalFunction"):
            parts.append(f"virtual function of {one_line(function['physicalFunction'])}")
        yield f"  PCI         {one_line(function.get('address'))} ({', '.join(parts)})"
    yield f"  names       {_names(device) or '-'}"
    yield f"  NUMA        {_numa(device)} ({one_line(device.get('numaSource')) or 'no source'})"
    yield f"  L3          {_caches(device, 1024)}"
    twice = " (conflict: only one of them may assign it)" if _is_managed_twice(device) else ""
    yield f"  manager     {_managers(device)}{twice}"
    for claim in map(as_map, as_list(device.get("claims"))):
        of = "/".join(one_line(claim[key]) for key in ("driver", "pool", "device") if claim.get(key))
        yield f"  claim       {one_line(claim.get('claim'))}: {of}"
    yield f"  container   {_holders(device)}"
    yield f"  health      {one_line(device.get('health')) or UNKNOWN}"
    for each in map(as_map, as_list(device.get("history"))):
        over = "" if each.get("exists") else " (gone)"
        yield f"  history     {_time(each.get('time'))}  {one_line(each.get('container'))}{over}"


def _names(device: Mapping[str, object]) -> str:
    names = [one_line(name) for name in as_list(device.get("interfaces"))]
    plugs = [as_map(each) for each in as_list(device.get("resources"))]
    names += [f"{one_line(plug.get('resource'))}={one_line(plug.get('id'))}" for plug in plugs]
    names += [one_line(name) for name in as_list(device.get("cdi"))]
    return ",".join(dict.fromkeys(name for name in names if name != device.get("name")))


def _numa(device: Mapping[str, object]) -> str:
    return ",".join(map(str, as_list(device.get("numa")))) or UNKNOWN


def _caches(device: Mapping[str, object], most: int) -> str:
    caches = [one_line(cpus) for cpus in as_list(device.get("l3"))]
    more = f" and {len(caches) - most} more" if len(caches) > most else ""
    return " ".join(caches[:most]) + more if caches else UNKNOWN


def _managers(device: Mapping[str, object]) -> str:
    return ",".join(map(one_line, as_list(device.get("managers")))) or UNKNOWN


def _is_managed_twice(device: Mapping[str, object]) -> bool:
    return len(as_list(device.get("managers"))) > 1


def _holders(device: Mapping[str, object]) -> str:
    containers = ",".join(map(one_line, as_list(device.get("containers"))))
    return containers or ("none" if device.get("containersKnown") is True else UNKNOWN)


def _time(seconds: object) -> str:
    at = time.localtime(seconds) if isinstance(seconds, int | float) else None
    return time.strftime("%Y-%m-%d %H:%M:%S", at) if at else UNKNOWN


def _missing_source(answer: Mapping[str, object]) -> str:
    """Return why devices may be missing; empty if all sources have answered."""
    daemon, kubelet = as_map(answer.get("daemon")), as_map(answer.get("kubelet"))
    if daemon.get("problem"):
        return f"Only the machine is shown: {one_line(daemon['problem'])}"
    if not kubelet.get("asked"):
        return "kubelet is not queried (kubelet.podResources): its devices and their containers are unknown"
    if kubelet.get("problem"):
        return f"kubelet's devices and their containers are unknown: {one_line(kubelet['problem'])}"
    return ""


def _notes(answer: Mapping[str, object]) -> Iterable[str]:
    """Return which sources are missing."""
    twice = [each for each in map(as_map, as_list(answer.get("devices"))) if _is_managed_twice(each)]
    for each in map(as_map, as_list(answer.get("refused"))):
        yield f"\n{one_line(each.get('reason'))}"
    if twice:
        names = ", ".join(one_line(each.get("name")) for each in twice[:_MOST_CONFLICTS])
        more = f" and {len(twice) - _MOST_CONFLICTS} more" if len(twice) > _MOST_CONFLICTS else ""
        yield f"\nSeveral managers have: {names}{more}. Only one of them may assign a device"
    if missing := _missing_source(answer):
        yield f"\n{missing}"

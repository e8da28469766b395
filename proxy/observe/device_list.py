"""Lists the devices of a machine by combining sysfs, CDI (container device interface) specs and the daemon.

The sources are matched by names: a CDI spec names device files, which sysfs maps to PCI functions; plugins of
network cards use PCI addresses as ids; NVIDIA's driver lists the UUIDs that its plugin uses. A device that
cannot be mapped to a PCI function is an entry of its own. Nothing is concluded from missing facts, with one
exception: a manager lists the containers of all devices that its plugins have, so a device of theirs without
a container is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.schema_ids import DEVICES
from proxy.observe.json_access import as_list, as_map
from proxy.topology.device_location import DeviceLocation
from proxy.topology.pci import PciFunction

KUBELET, DRA, TOPOPROXY = "kubelet", "DRA", "topoproxy"
HEALTHY, UNHEALTHY, NOT_ALLOCATABLE = "healthy", "unhealthy", "not allocatable"
SHARED_CACHE_LEVEL = 3
"""The lowest level at which several cores share a cache."""

Entry = dict[str, object]
Locate = Callable[[str], DeviceLocation]


class DeviceEntry:
    """The facts about one device; each source adds to them."""

    def __init__(self, name: str, functions: Sequence[PciFunction] = ()) -> None:
        self.name = name
        self.functions = tuple(functions)
        self.nodes: Mask | None = None
        self.source = ""
        self.resources: list[Entry] = []
        self.cdi: list[str] = []
        self.claims: list[Entry] = []
        self.managers: set[str] = set()
        self.containers: set[str] = set()
        self.containers_known = False
        self.health: str | None = None
        self.history: list[Entry] = []
        self.is_referred_to = False

    def set_location(self, nodes: Mask | None, source: str) -> None:
        """Record its location, unless the location is known already."""
        if self.nodes is None and (nodes or not self.source):
            self.nodes, self.source = nodes, source

    def as_json(self, machine: Machine) -> Entry:
        """Return the entry as data."""
        return {
            "name": self.name,
            "kind": next((f.kind for f in self.functions if f.kind), None),
            "pci": [
                {
                    "address": function.address,
                    "class": function.code or None,
                    "vendor": function.vendor or None,
                    "product": function.product or None,
                    "driver": function.driver or None,
                    "physicalFunction": function.physical or None,
                }
                for function in self.functions
            ],
            "interfaces": [name for function in self.functions for name in function.interfaces],
            "resources": self.resources,
            "cdi": self.cdi,
            "numa": None if self.nodes is None else list(self.nodes),
            "numaSource": self.source,
            "l3": _caches(machine, self.nodes),
            "managers": sorted(self.managers),
            "claims": self.claims,
            "containers": sorted(self.containers),
            "containersKnown": self.containers_known,
            "health": self.health,
            "history": self.history,
        }


class DeviceList:
    """The devices of a machine."""

    def __init__(
        self, machine: Machine, functions: Iterable[PciFunction], locate: Locate, ids: Mapping[str, str]
    ) -> None:
        """Begin with the PCI functions.

        Args:
            machine: The machine, for its caches.
            functions: All PCI functions.
            locate: Finds a device by its path or its CDI name.
            ids: Ids that plugins use, to PCI addresses.
        """
        self._machine = machine
        self._functions = {each.address: each for each in functions}
        self._locate = locate
        self._ids = ids
        self._entries: dict[str, DeviceEntry] = {}
        self._names: dict[str, DeviceEntry] = {}
        self._managed_entries: dict[str, DeviceEntry] = {}
        self._refused: list[Entry] = []
        for address, function in self._functions.items():
            self._entries[address] = entry = DeviceEntry(address, [function])
            entry.set_location(function.nodes, function.source)

    def add_cdi(self, names: Iterable[str]) -> None:
        """Add the devices of CDI specs."""
        for name in names:
            self._named_entry(name).cdi.append(name)

    def add_daemon(self, page: Mapping[str, object]) -> None:
        """Add the daemon's answer (``proxy.observe.device_assignments``)."""
        for part in _parts(page, "allocatable"):
            entry = self._managed_entry(part)
            entry.health, entry.containers_known = HEALTHY, True
        for part in _parts(page, "assigned"):
            entry = self._managed_entry(part)
            entry.containers.add(str(part.get("container")))
            entry.health, entry.containers_known = entry.health or NOT_ALLOCATABLE, True
        for part in _parts(page, "managed"):
            entry = self._managed_entry(part, TOPOPROXY, "topoproxy's device plugins")
            entry.containers.update(str(name) for name in as_list(part.get("containers")))
            entry.health, entry.containers_known = HEALTHY if part.get("healthy") is True else UNHEALTHY, True
        for part in _parts(page, "refused"):
            self._refused.append({key: str(part.get(key) or "") for key in ("resource", "reason")})
        for part in _parts(page, "claims"):
            self._add_claim(part)
        for part in _parts(page, "requested"):
            name = str(part.get("device"))
            plug = {"resource": part.get("resource"), "id": name, "numa": part.get("numa")}
            entry = self._managed_entry(plug) if plug["resource"] else self._named_entry(name)
            entry.containers.add(str(part.get("container")))
            entry.set_location(_mask(part.get("numa")), str(part.get("source")))
            entry.is_referred_to = True
        for part in _parts(page, "history"):
            name = str(part.get("device"))
            entry = self._managed_entries.get(name) or self._named_entry(name)
            entry.history.append({key: part.get(key) for key in ("time", "container", "exists")})
            entry.is_referred_to = True

    def as_json(self, *, all_functions: bool, daemon: str, kubelet: Mapping[str, object]) -> Entry:
        """Return the list as data.

        Args:
            all_functions: Whether to list PCI functions that containers are not given, such as bridges.
            daemon: Why the daemon did not answer; empty if it did.
            kubelet: What the daemon reports of kubelet.
        """
        shown = [e for e in self._entries.values() if all_functions or e.is_referred_to or _is_device(e)]
        return {
            "schema": DEVICES,
            "daemon": {"answered": not daemon, "problem": daemon},
            "kubelet": {"asked": bool(kubelet.get("asked")), "problem": str(kubelet.get("problem") or "")},
            "refused": self._refused,
            "devices": [entry.as_json(self._machine) for entry in shown],
        }

    # -- entries ------------------------------------------------------------------------------------------

    def _managed_entry(
        self,
        device: Mapping[str, object],
        manager: str = KUBELET,
        source: str = "kubelet's pod-resources API",
    ) -> DeviceEntry:
        """Return the entry of a device that a manager lists, with its resource."""
        resource, name = str(device.get("resource")), str(device.get("id"))
        key, nodes = f"{resource}={name}", _mask(device.get("numa"))
        address = self._ids.get(name, name.lower())
        known = self._managed_entries.get(key)
        entry = known or self._entry(address if address in self._functions else f"plugin {key}", key)
        if known is None:
            self._managed_entries[key] = entry
            entry.resources.append({"resource": resource, "id": name, "numa": nodes and list(nodes)})
        entry.set_location(nodes, source)
        entry.managers.add(manager)
        entry.is_referred_to = True
        return entry

    def _add_claim(self, claim: Mapping[str, object]) -> None:
        """Record that a container has the device of a claim, which a DRA driver prepared."""
        identity = {key: str(claim.get(key) or "") for key in ("claim", "driver", "pool", "device")}
        names = [str(name) for name in as_list(claim.get("cdi"))]
        whole = "/".join(identity[key] for key in ("driver", "pool", "device") if identity[key])
        entries = [self._named_entry(name) for name in names] or [self._entry(f"claim {whole}", whole)]
        for entry in dict.fromkeys(entries):
            if identity not in entry.claims:
                entry.claims.append(dict(identity))
            entry.managers.add(DRA)
            entry.containers.add(str(claim.get("container")))
            entry.is_referred_to = True

    def _named_entry(self, name: str) -> DeviceEntry:
        """Return the entry of a device path or a CDI name: its PCI function, if there is just one."""
        if (known := self._names.get(name)) is not None:
            return known
        place = self._locate(name)
        functions = [self._functions[f] for f in place.functions if f in self._functions]
        entry = self._entry(functions[0].address if len(functions) == 1 else name, name, functions)
        entry.set_location(place.nodes, place.source)
        entry.is_referred_to = True
        self._names[name] = entry
        return entry

    def _entry(self, key: str, name: str, functions: Sequence[PciFunction] = ()) -> DeviceEntry:
        """Return the entry under a key; it is made if there is none yet."""
        return self._entries.setdefault(key, DeviceEntry(name, functions))


def _parts(page: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    """Return the objects of a list; an answer of another version may hold something else."""
    return [part for item in as_list(page.get(key)) if (part := as_map(item))]


def _is_device(entry: DeviceEntry) -> bool:
    return any(function.is_assignable for function in entry.functions)


def _mask(nodes: object) -> Mask | None:
    ids = [node for node in as_list(nodes) if isinstance(node, int) and 0 <= node < Mask.LIMIT]
    return Mask(ids) if ids else None


def _caches(machine: Machine, nodes: Mask | None) -> list[str] | None:
    """Return the CPUs of each L3 cache on some NUMA nodes; None if either is not known."""
    near = CpuSet() if nodes is None else machine.cpus_of(nodes)
    caches = [
        c.cpus
        for c in machine.caches.values()
        if c.level >= SHARED_CACHE_LEVEL and not c.cpus.isdisjoint(near)
    ]
    return [str(cpus) for cpus in caches] or None

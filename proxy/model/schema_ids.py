"""The ids that JSON answers carry as ``schema``; the schema of an id is ``proxy/schemas/ID.json``.

The number behind the slash changes when a key goes away or changes its meaning. Keys never change their type,
and new keys may come without a new number. docs/json.md says which command and which page of the admin socket
answers with which id.
"""

from __future__ import annotations

from typing import Final

CLUSTER: Final = "topoproxy-cluster/1"
CHANGES: Final = "topoproxy-changes/1"
DEVICE_ASSIGNMENTS: Final = "topoproxy-device-assignments/1"
DEVICE_CAPACITY: Final = "topoproxy-device-capacity/1"
DEVICES: Final = "topoproxy-devices/1"
DOCTOR: Final = "topoproxy-doctor/1"
ENFORCE: Final = "topoproxy-enforce/1"
EXPLAIN: Final = "topoproxy-explain/1"
HOOKS_LIST: Final = "topoproxy-hooks-list/1"
HOOKS_POINTS: Final = "topoproxy-hooks-points/1"
HOOKS_RUN: Final = "topoproxy-hooks-run/1"
HOOKS_VALIDATE: Final = "topoproxy-hooks-validate/1"
INTERFACE: Final = "topoproxy-interface/1"
MACHINE: Final = "machine-facts/1"
NODE: Final = "topoproxy-node/1"
OBSERVE_REPORT: Final = "topoproxy-observe-report/1"
RELEASE: Final = "topoproxy-release/1"
RELOAD: Final = "topoproxy-reload/1"
SIMULATE: Final = "topoproxy-simulate/1"
SIMULATE_CLUSTER: Final = "topoproxy-simulate-cluster/1"
STATUS: Final = "topoproxy-status/1"
STATUS_MEMORY: Final = "topoproxy-status-memory/1"
TAKEOVER_PLAN: Final = "topoproxy-takeover-plan/1"
TAKEOVER_STATUS: Final = "topoproxy-takeover-status/1"
TAKEOVER_STEP: Final = "topoproxy-takeover-step/1"
UPGRADE: Final = "topoproxy-upgrade/1"
VERSION: Final = "topoproxy-version/1"

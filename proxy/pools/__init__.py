"""PURE. QoS rules, shared and BE pools, and the invariants of a node."""

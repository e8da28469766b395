"""PURE. QoS (quality of service) classes and pools: the claim of each container, the CPUs of the pools.

Also how a Pod object is read, and which part of it reaches the CRI.

QoS classes are Koordinator's: LSE (latency-sensitive exclusive), LSR (latency-sensitive reserved), LS
(latency-sensitive), BE (best effort) and SYSTEM. LSE and LSR pods own CPUs, LS pods run on the shared pool,
BE pods on the BE pool, SYSTEM pods on CPUs that the node keeps for them.
"""

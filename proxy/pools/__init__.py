"""PURE. QoS classes and the pools: what each container may claim, and which CPUs the pools have.

Also how a Pod object is read, and which part of it reaches the CRI.

QoS classes are Koordinator's: LSE (latency-sensitive exclusive), LSR (latency-sensitive reserved), LS
(latency-sensitive), BE (best effort) and SYSTEM. LSE and LSR pods own CPUs, LS pods run on the shared pool,
BE pods on the BE pool, SYSTEM pods on CPUs that the node keeps for them.
"""

"""Memory of NUMA nodes: accounting, hints and allocation, as kubelet's memory manager (policy ``Static``)."""

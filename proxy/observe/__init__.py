"""Reports of the daemon: decisions as sentences and as data, metrics, and the node's description."""

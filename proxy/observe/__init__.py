"""What the daemon reports: decisions as sentences and as data, metrics, and the node's description."""

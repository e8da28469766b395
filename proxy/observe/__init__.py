"""What leaves the node: decisions in sentences and as data."""

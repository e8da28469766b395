"""What leaves the node: decisions told in sentences and as data."""

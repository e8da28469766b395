"""What ``topoproxy upgrade --check`` compares before another version takes a node over."""

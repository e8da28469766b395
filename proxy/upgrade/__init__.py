"""The checks of ``topoproxy upgrade --check`` before another version takes a node over."""

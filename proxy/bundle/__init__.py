"""Collects the content of ``topoproxy bundle`` for a bug report, and redacts it."""

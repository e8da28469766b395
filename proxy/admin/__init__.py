"""Asking a running daemon: a small HTTP server on a private socket, its client, and the status page.

Import from the modules: the daemon needs the server alone.
"""

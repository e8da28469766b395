"""Asking a running daemon: a small HTTP server on a private socket, its client, the page of the answer.

Import from the modules: the daemon needs the server alone.
"""

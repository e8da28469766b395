"""Asking a running daemon: a small HTTP server on a private socket, its client, the page of the answer."""

from __future__ import annotations

from proxy.admin.client import ask
from proxy.admin.page import render
from proxy.admin.server import AdminServer

__all__ = ["AdminServer", "ask", "render"]

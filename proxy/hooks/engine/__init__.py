"""Asking hooks: in order, in time, and so that none can hurt the node or another hook."""

from proxy.hooks.engine.engine import Engine
from proxy.hooks.engine.stats import HookReport

__all__ = ["Engine", "HookReport"]

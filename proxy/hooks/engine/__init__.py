"""The hook engine: calls hooks in order, within deadlines, and isolated from the node and from each other."""

from proxy.hooks.engine.engine import HookEngine
from proxy.hooks.engine.stats import HookReport

__all__ = ["HookEngine", "HookReport"]

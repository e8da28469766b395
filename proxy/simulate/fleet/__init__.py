"""Fleets of nodes and streams of pods: the stock scheduler, and the same with the scheduler extender."""

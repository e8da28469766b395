"""The decisions of the scheduler extender: pure, on the engine's own code."""

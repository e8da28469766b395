"""PURE. Event and node state in, plan out."""

"""PURE. Decisions about pods and containers: a request and the state of the node in, a plan out."""

"""Telemetry: log records, problems and metrics of the daemon, behind one port.

- ``metrics``: every counter, gauge and histogram, each declared once;
- ``registry``: the types of declarations, and the values of counters and histograms;
- ``exposition``: Prometheus' text format;
- ``port``: ``Telemetry``, through which all other modules count, log and report problems;
- ``text``: keys and values of a record as text;
- ``reference``: ``docs/metrics.md``, made from the declarations.
"""

"""The admin socket of the daemon: a small HTTP server, its client, and the status page.

Import from the modules: the daemon needs the server alone.
"""

QUERY_LIMIT = 1024
"""Bytes that the parameters of a request may have, encoded. The client does not send more."""

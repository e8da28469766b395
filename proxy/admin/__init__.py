"""The admin socket of the daemon: a small HTTP server, its client, and the status page.

Import from the modules: the daemon needs the server alone.
"""

QUERY_LIMIT = 1024
"""The most bytes that the encoded parameters of a request may have. The client does not send more."""

"""The admin socket of the daemon: a small HTTP server, its client, and the status page.

Import from the modules: the daemon needs the server alone.
"""

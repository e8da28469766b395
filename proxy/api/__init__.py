"""Messages generated from ``proto/`` by ``make proto``: one package for each peer.

Imports nothing else of proxy.
"""

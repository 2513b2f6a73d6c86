"""The agent: local server, arenas, engine, driver, membership, peers, discovery, kernels.

The command line uses it; clients never import it, they talk to it over its socket.
"""

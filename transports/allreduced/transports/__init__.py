"""Links between agents: one contract (``base``), its implementations by scheme, and the registry that finds them.

The daemon uses links through ``registry`` and ``base`` only; nobody imports a transport by name.
"""

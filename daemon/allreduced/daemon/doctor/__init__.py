"""What is misconfigured on this node and between the agents, each finding with the command that mends it.

Facts are gathered by functions that look at the machine (``machine``, ``network``, ``local_socket``), and judged by
pure ones; ``examination`` puts them together for ``allreduced doctor``.
"""

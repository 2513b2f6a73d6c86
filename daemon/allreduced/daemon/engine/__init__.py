"""The heart of the agent, sans-IO: ``engine.handle(event, now) -> actions``.

The same events give the same actions: no clock, socket, thread or randomness inside. ``driver`` executes the actions.
"""

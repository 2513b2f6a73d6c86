"""Who is in which group, sans-IO: ``membership.handle(event, now) -> actions``.

Clients claim ranks; agents announce claims to each other; the agent that holds rank 0 forms the group when every rank
is there. Losses break a group or, later, begin its next generation. No clock, socket or randomness inside.
"""

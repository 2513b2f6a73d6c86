"""Who is in which group, sans-IO: ``membership.handle(event, now) -> actions``. No clock, socket or randomness inside.

``membership`` takes events apart; ``forming`` turns claims to ranks into groups on which all members agree; ``running``
knows what becomes of these; both work on the ``scene``. Losses break a group or, later, begin its next generation.
``gathering`` and ``instance`` are their data, ``wording`` says to users what went wrong.
"""

"""Who is in which group, sans-IO: ``membership.handle(event, now) -> actions``. No clock, socket or randomness inside.

``membership`` takes events apart; ``forming`` turns claims to ranks into groups on which all members agree; ``running``
knows what becomes of these; both work on the ``scene``. Losses and reset links end a generation of a group by one
decision of its members: ``change`` is one member's part in it, by ``ballot``, and ``merge`` makes what it says.
``gathering`` and ``instance`` are their data, ``wording`` says to users what went wrong.

``liveness`` stands for itself: it tells which agents live. docs/failure.md explains all of it.
"""

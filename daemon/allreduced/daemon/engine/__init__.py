"""The heart of the agent, sans-IO: ``engine.handle(event, now) -> actions``.

The same events give the same actions: no clock, socket, thread or randomness inside. ``driver`` executes the actions.

Who is who, from the top: ``engine`` takes events apart; ``matching`` knows who arrived at which ``operation`` of which
``group``; ``admission`` gives memory in the agreed order and speaks the READY protocol; ``execution`` (or ``solo``, for
groups on one node) runs the ``program`` of a schedule tile by tile; ``ending`` delivers, fails, frees; ``leases`` and
``memory`` know who uses which bytes. ``disputes`` and ``departures`` find what cannot end well, ``wording`` says to
users what went wrong.

What makes the outcome of an operation one on all members: ``verdict`` (they fail it together), ``kept`` (results stay
until all have them), ``freshness`` (nothing is delivered out of touch), ``change`` and ``fetch`` (what follows where
members or links are lost), ``fence`` (what was sent before that does not count).
"""

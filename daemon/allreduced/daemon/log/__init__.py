"""How the agent writes its log: fields of a line, as text, as JSON or to the journal, how many lines, and by whom.

The code says ``logger.warning("event=peer_lost node=%s", node)``: one event, then ``key=%…`` pairs, and nothing
else. So the fields of a line are known without parsing what was written. A line is made where something is logged; the
thread of a ``LineWriter`` puts it on an outlet, which may block. ``daemon.logs`` sets it up.
"""

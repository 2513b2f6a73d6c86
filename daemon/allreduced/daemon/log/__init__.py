"""How the agent writes its log: fields of a line, as text, as JSON or to the journal, and how many lines.

The code says ``logger.warning("event=peer_lost node=%s", node)``: one event, then ``key=%…`` pairs, and nothing
else. So the fields of a line are known without parsing what was written. ``daemon.logs`` sets it up.
"""

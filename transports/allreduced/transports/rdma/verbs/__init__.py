"""Verbs of this machine, on pyverbs: implements ``verbs_port``. Only these modules import it.

pyverbs keeps Python's lock in every call, so nothing here may block: events are taken only where a descriptor is
readable. Its work requests and scatter-gather elements leak unless closed, and crash when closed twice.
"""

from allreduced.transports.rdma.verbs.machine import PyverbsVerbs, load

__all__ = ["PyverbsVerbs", "load"]

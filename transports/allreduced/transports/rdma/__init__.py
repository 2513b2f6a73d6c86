"""Links over RDMA: control and authentication over TCP, data by ibverbs straight into the posted memory.

``verbs_port`` is what is asked of verbs, and ``verbs`` the only package that imports pyverbs, when the first link needs
it.
"""

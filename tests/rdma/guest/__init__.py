"""A guest machine with an RDMA device, for tests: Debian's kernel with soft-RoCE, in QEMU's software emulation.

``python -m tests.rdma.guest prepare`` fetches what it needs, ``… run -- COMMAND`` boots it and runs a command as root.
The guest sees this machine's files at their own places, under a writable layer of its own: what is written there is
gone afterwards, but for what is written into ``$GUEST_OUT``. Its processors are emulated: it is slow, but has real
verbs, and nothing of it touches this machine's kernel.
"""

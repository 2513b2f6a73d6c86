"""The client SDK: ``connect()`` attaches this process to its node's agent and returns a communicator."""

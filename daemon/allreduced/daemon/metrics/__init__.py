"""Metrics of an agent: what is counted, how it is told to Prometheus, and the small HTTP server for it.

``calls``, ``kernels``, ``loop_lag`` and, in the engine, ``lateness`` count in plain numbers while the agent works. On a
scrape ``facts`` collects them, ``families`` makes Prometheus' metrics of them as ``catalogue`` describes each, and
``exposition`` the text. ``http`` answers requests and ``monitoring`` puts all together. Nothing outside imports more
than ``monitoring``.
"""

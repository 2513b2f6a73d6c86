"""The ``allreduced`` command.

``main`` parses and dispatches; ``agent``, ``run``, ``demo`` and ``bench`` are its subcommands. ``front`` and
``supervisor`` are the two halves of a started job (described by ``job``): the front stands for the job to the shell,
the supervisor owns every process of it. ``processes`` and ``output`` are their tools. ``measure`` is what ranks of a
benchmark do. ``demo_training`` is the demo's training program, which needs nothing of this package and is meant to be
copied.
"""

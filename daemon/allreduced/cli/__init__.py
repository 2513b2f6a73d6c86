"""The ``allreduced`` command."""

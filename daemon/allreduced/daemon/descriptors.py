"""The limit on open descriptors of this process."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger("allreduced.agent")


def raise_descriptor_limit() -> int:
    """Raise the limit to what the system allows this process, and return the one that holds now.

    Every connection takes a descriptor, and so does every result arena; the usual soft limit of 1024 is for programs
    that call select(2), which the agent does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # a hard limit above fs.nr_open, such as "unlimited"
        logger.warning("event=descriptor_limit_kept soft=%d hard=%d error=%r", soft, hard, str(error))
        return soft
    return hard

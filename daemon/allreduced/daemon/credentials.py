"""The certificate, the key and the authorities of an agent, replaced while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import Final

from allreduced.core.aside import run_aside
from allreduced.core.errors import AllReducedError
from allreduced.daemon.certificate_end import End
from allreduced.daemon.certificate_files import CertificateFiles, Loaded, files_of, load, signature_of
from allreduced.daemon.settings import Settings

logger = logging.getLogger("allreduced.security")

LOOK_EVERY: Final = 10.0
"""Seconds between two looks whether the files have changed."""

WARN_BEFORE: Final = 14 * 86400.0
"""Seconds before the end of a certificate in which that is said once a day."""

_DAY: Final = 86400.0


class FileCredentials:
    """Implements ``transports.base.Credentials`` with files, for the agent of ``node``.

    ``loaded``: what was in the files, where they were read just now; None: they are read.

    New files hold for new connections; those that are open live on. Files that are of no use change nothing.

    :raises ConfigError: a file cannot be read or is none of its kind.
    :raises AuthenticationError: others may read the key, or peers would not accept the certificate.
    """

    def __init__(
        self,
        files: CertificateFiles,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        loaded: Loaded | None = None,
    ) -> None:
        self._node = node
        self._clock = clock
        self._loaded = load(files, node) if loaded is None else loaded
        self._warned = -_DAY
        self._complaint, self._complained = "", -_DAY
        self._warn()

    @property
    def end(self) -> End:
        """Which of the certificates in force ends first: the node's, one between, or the authority's."""
        return self._loaded.end

    @property
    def expires(self) -> float:
        """When the first of the certificates in force ends, in seconds since 1970."""
        return self._loaded.expires

    def context(self, *, listening: bool) -> ssl.SSLContext:
        """Return what the next connection is encrypted with. See ``transports.base.Credentials``."""
        return self._loaded.listening if listening else self._loaded.dialling

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Read the files that ``settings`` name, which blocks, and return what puts them into force.

        This is what a reload of the settings calls (``reloading.Prepare``).

        :raises ConfigError: as the class; what was in force stays so.
        :raises AuthenticationError: likewise.
        """
        # Settings whose mode differs need a restart; until then the files from before hold.
        files = files_of(settings.security) or self._loaded.files
        loaded = load(files, self._node)
        return lambda: self._use(loaded)

    def look(self) -> Callable[[], None] | None:
        """Read the files again where they are not those in force, which blocks; return what puts them into force.

        None: there is nothing new, or it is of no use. What is in the way is told once, and again every day.
        """
        files = self._loaded.files
        try:
            if signature_of(files) == self._loaded.signature:
                self._complaint = ""
                return None
        except OSError:
            pass  # reading them tells it in better words
        try:
            loaded = load(files, self._node)
        except (AllReducedError, OSError) as error:
            self._complain(str(error))
            return None
        return lambda: self._use(loaded)

    def _complain(self, reason: str) -> None:
        if reason != self._complaint or self._clock() - self._complained >= _DAY:
            self._complaint, self._complained = reason, self._clock()
            logger.error("event=certificate_not_taken in_force=old error=%r", reason)

    async def watch(self) -> None:
        """Take new files as they come, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                use = await asyncio.wrap_future(run_aside(self.look, "certificates"))
            except Exception:  # a defect, which must not end the looking
                logger.exception("event=defect handling=certificates")
                continue
            if use is not None:
                use()
            self._warn()

    def _use(self, loaded: Loaded) -> None:
        changed = loaded.digest != self._loaded.digest or loaded.files != self._loaded.files
        self._loaded, self._complaint = loaded, ""
        if changed:
            ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(loaded.expires))
            logger.warning("event=certificate_changed file=%s expires=%s", loaded.files.certificate, ends)
            self._warned = -_DAY
            self._warn()

    def _warn(self) -> None:
        end, now = self._loaded.end, self._clock()
        left = end.at - time.time()
        if left < WARN_BEFORE and now - self._warned >= _DAY:
            self._warned = now
            logger.warning(
                "event=certificate_expires file=%s subject=%r days=%.1f hint=%r",
                end.file,
                end.subject,
                left / _DAY,
                end.hint(self._node),
            )

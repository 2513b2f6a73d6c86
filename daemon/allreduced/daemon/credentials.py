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
from allreduced.daemon.certificate_files import CertificateFiles, Loaded, files_of, load, signature_of
from allreduced.daemon.settings import Settings

logger = logging.getLogger("allreduced.security")

LOOK_EVERY: Final = 10.0
"""Seconds between two looks whether the files have changed."""

WARN_BEFORE: Final = 14 * 86400.0
"""Seconds before the end of the certificate in which that is said once a day."""

_DAY: Final = 86400.0


class FileCredentials:
    """Implements ``transports.base.Credentials`` with files, for the agent of ``node``.

    New files hold for new connections; those that are open live on. Files that are of no use change nothing.

    :raises ConfigError: a file cannot be read or is none of its kind.
    :raises AuthenticationError: others may read the key, or peers would not accept the certificate.
    """

    def __init__(self, files: CertificateFiles, node: str) -> None:
        self._node = node
        self._loaded = load(files, node)
        self._tried = self._loaded.signature
        self._warned = -_DAY
        self._warn()

    @property
    def expires(self) -> float:
        """When the certificate that is in force ends, in seconds since 1970."""
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
        """Read the files again if they look different, which blocks; return what puts them into force, or None.

        Files that are of no use are told of once, in the log.
        """
        files = self._loaded.files
        try:
            signature = signature_of(files)
            if signature == self._tried:
                return None
            self._tried = signature
            loaded = load(files, self._node)
        except (AllReducedError, OSError) as error:
            logger.error("event=certificate_not_taken in_force=old error=%r", str(error))
            return None
        return lambda: self._use(loaded)

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
        changed = loaded.signature != self._loaded.signature or loaded.files != self._loaded.files
        self._loaded, self._tried = loaded, loaded.signature
        if changed:
            ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(loaded.expires))
            logger.warning("event=certificate_changed file=%s expires=%s", loaded.files.certificate, ends)
            self._warned = -_DAY
            self._warn()

    def _warn(self) -> None:
        left = self._loaded.expires - time.time()
        if left < WARN_BEFORE and time.monotonic() - self._warned >= _DAY:
            self._warned = time.monotonic()
            logger.warning(
                "event=certificate_expires file=%s days=%.1f hint=%r",
                self._loaded.files.certificate,
                left / _DAY,
                f"allreduced certs node --force {self._node}",
            )

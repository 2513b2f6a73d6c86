"""Rereads the settings of a running agent. What is wrong with the new ones changes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from allreduced.core.aside import MORE_THREADS, run_aside
from allreduced.core.errors import AllReducedError, ConfigError, LimitExceeded
from allreduced.daemon.reload_plan import ReloadPlan, plan_reload
from allreduced.daemon.service_manager import ServiceManager
from allreduced.daemon.settings import Settings

logger = logging.getLogger("allreduced.agent")

PATIENCE = 15.0
"""Seconds in which settings, and what they name, must be read: names of hosts alone are waited for up to ten."""

MOST_HUNG = 8
"""Readings that may hang; each holds a thread until it ends."""

Apply: TypeAlias = "Callable[[Settings], None]"
"""Puts settings into force; must not fail."""
Prepare: TypeAlias = "Callable[[Settings], Callable[[], None]]"
"""Reads what settings name (a certificate, say), in a thread, and returns what puts it into force; may raise an error
of the tree."""

_Read: TypeAlias = "tuple[ReloadPlan, list[Callable[[], None]]]"
"""What a reload is to do, and what puts the files that were read into force."""

_HANGS = "the file, or one that it names, may be on a file system that hangs; reload again when that is mended"


class Reloading:
    """Does one reload at a time; several that are asked for meanwhile are one. One that hangs is given up.

    ``load``: reads the settings; it is called in a thread, and may raise an error of the tree. ``apply``: called with
    all settings that hold from then on. ``prepare``: files that are read again even where no setting changed.
    """

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Settings],
        apply: Apply,
        manager: ServiceManager,
        status: Callable[[], str],
        *,
        prepare: tuple[Prepare, ...] = (),
    ) -> None:
        self._settings = settings
        self._load = load
        self._apply = apply
        self._manager = manager
        self._status = status
        self._prepare = prepare
        self._task: asyncio.Task[None] | None = None
        self._hung: list[Future[_Read]] = []
        self._again = False
        self._note = ""

    @property
    def settings(self) -> Settings:
        """What is in force."""
        return self._settings

    @property
    def note(self) -> str:
        """What an administrator must know of the last reload; empty where all is well."""
        return self._note

    def ask(self) -> None:
        """Reload now, or once more after the reload that runs."""
        if self._task is not None:
            self._again = True
            return
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def idle(self) -> None:
        """Return when all that was asked for is done."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Reload no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while True:
                self._again = False
                self._manager.reloading()
                await self._reload()
                self._manager.ready(self._status())
                if not self._again:
                    return
        finally:
            self._task = None

    async def _reload(self) -> None:
        try:
            plan, steps = await self._read_in_time()
        except AllReducedError as error:
            self._note = f"reload failed, the settings from before are in force: {error.message}"
            logger.error("event=reload_failed in_force=old error=%r", str(error))
            return
        except Exception as error:  # a defect, which must not end an agent over which jobs run
            self._note = f"reload failed, the settings from before are in force: {error!r}"
            logger.exception("event=defect handling=reload")
            return
        try:
            self._settings = plan.settings
            for step in steps:
                step()
            self._apply(plan.settings)
        except Exception as error:  # a defect, too; what was put into force stays
            self._note = f"reload failed half-way, restart the agent: {error!r}"
            logger.exception("event=defect handling=reload")
            return
        for change in plan.applied:
            logger.warning("event=setting_changed setting=%s old=%r new=%r", change.setting, change.old, change.new)
        for change in plan.restart:
            logger.warning(
                "event=restart_needed setting=%s in_force=%r new=%r why=%r",
                *(change.setting, change.old, change.new, change.why),
            )
        waiting = ", ".join(change.setting for change in plan.restart)
        self._note = f"restart needed for {waiting}" if waiting else ""
        logger.info("event=reloaded result=%r", plan.describe())

    async def _read_in_time(self) -> _Read:
        """Read everything, beside the loop, for a bounded time.

        :raises ConfigError: that hangs.
        :raises LimitExceeded: there can be no further thread.
        :raises Exception: what reading raised.
        """
        self._hung = [reading for reading in self._hung if not reading.done()]
        if len(self._hung) >= MOST_HUNG:
            raise ConfigError(f"{MOST_HUNG} earlier reloads hang still, in reading the settings", hint=_HANGS)
        try:
            reading = run_aside(self._read, "reload")
        except OSError as error:
            raise LimitExceeded("the agent can start no thread to read the settings", hint=MORE_THREADS) from error
        try:
            return await asyncio.wait_for(asyncio.wrap_future(reading), PATIENCE)
        except TimeoutError:
            if reading.done():
                return reading.result()  # ended in the last moment, or it is the reading's own
            self._hung.append(reading)
            raise ConfigError(f"the settings could not be read within {PATIENCE:g} s", hint=_HANGS) from None

    def _read(self) -> _Read:
        plan = plan_reload(self._settings, self._load())
        return plan, [prepare(plan.settings) for prepare in self._prepare]

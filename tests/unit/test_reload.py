"""A running agent takes over what it can, says what it cannot, and keeps the old settings where the new are broken."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import msgspec
import pytest

from allreduced.core.errors import AllReducedError, AuthenticationError, ConfigError
from allreduced.daemon import reloading
from allreduced.daemon.reload_plan import AT_RUN_TIME, Change, plan_reload
from allreduced.daemon.reloading import Reloading
from allreduced.daemon.service_manager import ServiceManager
from allreduced.daemon.settings import SECTIONS, Settings
from allreduced.daemon.settings_reader import parse

BOUND = 20.0
PEER = '[[peers.static]]\nnode = "b"\naddress = "tcp://10.0.0.2:4123"\n'


def settings(text: str) -> Settings:
    return parse(text, "agent.toml", {}, {})


def test_nothing_changed() -> None:
    plan = plan_reload(Settings(), Settings())
    assert (plan.settings, plan.applied, plan.restart) == (Settings(), (), ())
    assert plan.describe() == "nothing changed"


def test_what_holds_at_once_and_what_needs_a_restart() -> None:
    old = settings('[agent]\nlog_level = "info"\n[engine]\nthreads = 1\n')
    new = settings('[agent]\nlog_level = "debug"\n[engine]\nthreads = 2\n[limits]\nclients = 5\n')
    plan = plan_reload(old, new)
    assert plan.applied == (Change("agent.log_level", "info", "debug"), Change("limits.clients", "1024", "5"))
    assert plan.restart == (Change("engine.threads", "1", "2"),)
    assert (plan.settings.agent.log_level, plan.settings.engine.threads, plan.settings.limits.clients) == (
        "debug",
        1,
        5,
    )
    assert plan.describe() == "changed: agent.log_level, limits.clients; needs a restart: engine.threads"


def test_what_needs_a_restart_is_told_until_there_was_one() -> None:
    old, new = Settings(), settings("[engine]\nthreads = 2\n")
    assert plan_reload(plan_reload(old, new).settings, new).restart == (Change("engine.threads", "0", "2"),)


def test_a_secret_is_not_shown() -> None:
    plan = plan_reload(settings('[security]\nsecret = "old"\n'), settings('[security]\nsecret = "new"\n'))
    assert plan.restart == (Change("security.secret", "********", "********"),)


def test_peers_can_change_where_the_agent_listens() -> None:
    plan = plan_reload(
        settings('[peers]\nlisten = "tcp://127.0.0.1:0"\n'), settings(f'[peers]\nlisten = "tcp://127.0.0.1:0"\n{PEER}')
    )
    assert plan.applied == (Change("peers.static", "-", "b=tcp://10.0.0.2:4123"),)
    assert plan.settings.peers.static[0].node == "b"


def test_the_first_peer_of_an_agent_that_listens_nowhere_needs_a_restart() -> None:
    (change,) = plan_reload(Settings(), settings(PEER)).restart
    assert (change.setting, change.why) == ("peers.static", "this agent has no peers and listens nowhere")


def test_every_setting_is_either_kind_and_every_one_of_the_list_exists() -> None:
    names = {f"{section}.{key}" for section, schema in SECTIONS.items() for key in schema.__struct_fields__}
    assert names >= AT_RUN_TIME
    for name in names:
        section, _, key = name.partition(".")
        old = settings('[peers]\nlisten = "tcp://127.0.0.1:0"\n[security]\nmode = "mtls"\n')
        part = msgspec.structs.replace(getattr(old, section), **{key: "another"})
        plan = plan_reload(old, msgspec.structs.replace(old, **{section: part}))
        assert [change.setting for change in plan.applied] == ([name] if name in AT_RUN_TIME else [])
        assert [change.setting for change in plan.restart] == ([] if name in AT_RUN_TIME else [name])


class Reloaded:
    """A reloading whose file is a list of settings, or errors, one for each time it is read."""

    def __init__(
        self, *files: Settings | AllReducedError, prepare: Callable[[Settings], Callable[[], None]] | None = None
    ):
        self.files = list(files)
        self.applied: list[Settings] = []
        self.before: Callable[[float], object] = lambda bound: None
        self.reloading = Reloading(
            Settings(),
            self.load,
            self.applied.append,
            ServiceManager({}),
            lambda: "",
            prepare=() if prepare is None else (prepare,),
        )

    def load(self) -> Settings:
        assert threading.current_thread() is not threading.main_thread()  # a file may be on a slow disk
        self.before(BOUND)
        file = self.files.pop(0)
        if isinstance(file, AllReducedError):
            raise file
        return file

    async def reload(self) -> None:
        self.reloading.ask()
        await self.reloading.idle()


async def test_a_reload_puts_into_force_what_it_can(caplog: pytest.LogCaptureFixture) -> None:
    new = settings("[limits]\nclients = 5\n[engine]\nthreads = 2\n")
    caplog.set_level(logging.INFO)
    reloaded = Reloaded(new)
    await reloaded.reload()
    assert reloaded.applied == [settings("[limits]\nclients = 5\n")] == [reloaded.reloading.settings]
    assert reloaded.reloading.note == "restart needed for engine.threads"
    assert "event=setting_changed setting=limits.clients old='1024' new='5'" in caplog.text
    assert "event=restart_needed setting=engine.threads in_force='0' new='2'" in caplog.text


async def test_a_broken_file_changes_nothing_and_that_is_told_until_it_is_mended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = settings("[limits]\nclients = 5\n")
    reloaded = Reloaded(good, ConfigError("agent.toml is no TOML"), good)
    await reloaded.reload()
    await reloaded.reload()
    assert reloaded.reloading.settings == good
    assert reloaded.reloading.note == "reload failed, the settings from before are in force: agent.toml is no TOML"
    assert "event=reload_failed in_force=old error='agent.toml is no TOML'" in caplog.text
    await reloaded.reload()
    assert reloaded.reloading.note == ""
    assert reloaded.applied == [good, good]


async def test_files_that_settings_name_are_read_first_and_all_or_nothing_holds() -> None:
    broken = True
    done: list[str] = []

    def prepare(new: Settings) -> Callable[[], None]:
        if broken:
            raise AuthenticationError("the certificate has expired")
        return lambda: done.append(f"clients={new.limits.clients}")

    new = settings("[limits]\nclients = 5\n")
    reloaded = Reloaded(new, new, prepare=prepare)
    await reloaded.reload()
    assert (reloaded.applied, done) == ([], [])
    broken = False
    await reloaded.reload()
    assert (reloaded.applied, done) == ([new], ["clients=5"])


async def test_a_defect_ends_no_agent_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def prepare(new: Settings) -> Callable[[], None]:
        nothing: list[None] = []
        return nothing.pop

    reloaded = Reloaded(settings("[limits]\nclients = 5\n"), prepare=prepare)
    await reloaded.reload()
    assert reloaded.reloading.note.startswith("reload failed half-way, restart the agent: IndexError")
    assert "event=defect handling=reload" in caplog.text


def test_the_end_does_not_wait_for_a_file_that_cannot_be_read_to_its_end() -> None:
    begun, told = threading.Event(), threading.Event()

    def load() -> Settings:
        begun.set()
        assert told.wait(BOUND)
        return Settings()

    async def give_up() -> None:
        reloading = Reloading(Settings(), load, lambda new: None, ServiceManager({}), lambda: "")
        reloading.ask()
        while not begun.is_set():  # noqa: ASYNC110 # a thread sets it
            await asyncio.sleep(0)
        await reloading.close()

    asyncio.run(give_up())
    assert not told.is_set()
    told.set()


async def test_a_reload_that_hangs_is_given_up_and_later_ones_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    good = settings("[limits]\nclients = 5\n")
    reloaded = Reloaded(good)
    reloaded.before = told.wait
    monkeypatch.setattr(reloading, "PATIENCE", 0.0)
    failed = "the settings could not be read within 0 s"
    for _ in range(reloading.MOST_HUNG):
        await reloaded.reload()
        assert reloaded.reloading.note == f"reload failed, the settings from before are in force: {failed}"
    assert caplog.text.count(f"event=reload_failed in_force=old error='{failed}") == reloading.MOST_HUNG
    await reloaded.reload()
    assert reloaded.reloading.note.endswith(": 8 earlier reloads hang still, in reading the settings")
    assert reloaded.applied == []
    hung = [thread for thread in threading.enumerate() if thread.name == "reload"]
    assert len(hung) == reloading.MOST_HUNG
    told.set()
    for thread in hung:
        thread.join(BOUND)
    reloaded.files = [good]
    monkeypatch.setattr(reloading, "PATIENCE", BOUND)
    await reloaded.reload()
    assert (reloaded.reloading.note, reloaded.applied) == ("", [good])


async def test_no_thread_for_a_reload_is_told_and_later_ones_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = settings("[limits]\nclients = 5\n")
    reloaded = Reloaded(good)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        await reloaded.reload()
    failed = "the agent can start no thread to read the settings"
    assert reloaded.reloading.note == f"reload failed, the settings from before are in force: {failed}"
    assert f"event=reload_failed in_force=old error='{failed}" in caplog.text
    assert "defect" not in caplog.text
    await reloaded.reload()
    assert (reloaded.reloading.note, reloaded.applied) == ("", [good])


def _refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_reloads_asked_for_meanwhile_are_one() -> None:
    reloaded = Reloaded(*[Settings()] * 2)
    reloaded.reloading.ask()
    await asyncio.sleep(0)  # the file is being read now, and may change after that
    for _ in range(5):
        reloaded.reloading.ask()
    await reloaded.reload()
    assert len(reloaded.applied) == 2
    await reloaded.reloading.close()

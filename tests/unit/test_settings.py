"""One schema; every wrong setting is an error that says where it is and what is allowed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from allreduced.cli.main import main
from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.daemon.settings import Settings, StaticPeer, default_socket, secret_bytes
from allreduced.daemon.settings_reader import load, parse
from allreduced.daemon.sizes import parse_size
from allreduced.daemon.timing import derived

CONFIGS = Path(__file__).parents[2] / "configs"


def test_nothing_given_gives_the_defaults() -> None:
    assert parse(None, "", {}, {}) == Settings()
    assert Settings().timing.heartbeat == 0.625


def test_the_command_line_beats_the_environment_and_that_beats_the_file() -> None:
    text = '[engine]\nthreads = 1\nnice = 1\ncpus = [1, 2]\n[limits]\narena_bytes = "512MiB"\n'
    environ = {"ALLREDUCED_ENGINE_NICE": "2", "ALLREDUCED_ENGINE_THREADS": "2", "HOME": "/root"}
    settings = parse(text, "agent.toml", environ, {"engine.threads": 3})
    assert (settings.engine.threads, settings.engine.nice, settings.engine.cpus) == (3, 2, (1, 2))
    assert settings.limits.arena_bytes == 512 << 20


def test_variables_hold_lists_booleans_sizes_and_peers() -> None:
    settings = parse(
        None,
        "",
        {
            "ALLREDUCED_ENGINE_CPUS": "0, 3",
            "ALLREDUCED_INSECURE": "1",
            "ALLREDUCED_SECRET": "s3cret",
            "ALLREDUCED_ENGINE_TILE_BYTES": "512KiB",
            "ALLREDUCED_PEERS_STATIC": "b=tcp://10.0.0.2:4123,c=tcp://[::1]:5",
            "ALLREDUCED_AGENT": "require",
            "ALLREDUCED_JOB": "j",
        },
        {},
    )
    assert settings.engine.cpus == (0, 3)
    assert settings.security.insecure is True
    assert secret_bytes(settings) == b"s3cret"
    assert settings.engine.tile_bytes == 512 << 10
    assert settings.peers.static == (
        StaticPeer(node="b", address="tcp://10.0.0.2:4123"),
        StaticPeer(node="c", address="tcp://[::1]:5"),
    )


def test_the_long_name_of_the_secret_beats_the_short_one() -> None:
    environ = {"ALLREDUCED_SECRET": "short", "ALLREDUCED_SECURITY_SECRET": "long"}
    assert parse(None, "", environ, {}).security.secret == "long"


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("[engine]\nthread = 1\n", "agent.toml: $.engine.thread", "did you mean 'threads'?"),
        ("[engin]\nthreads = 1\n", "agent.toml: $.engin", "did you mean 'engine'?"),
        ("[engine]\nthreads = -1\n", "agent.toml: $.engine.threads", ">= 0"),
        ('[engine]\nthreads = "two"\n', "agent.toml: $.engine.threads", "Expected `int`"),
        ("[engine]\ntile_bytes = 300000\n", "agent.toml: $.engine.tile_bytes", "a power of two"),
        ('[limits]\narena_bytes = "5 elephants"\n', "agent.toml: $.limits.arena_bytes", "MiB"),
        ('[agent]\nlog_level = "loud"\n', "agent.toml: $.agent.log_level", "one of debug, info, warning, error"),
        ("[engine]\ncpus = [-1]\n", "agent.toml: $.engine.cpus[0]", ">= 0"),
        ('[[peers.static]]\nnode = "b"\naddres = "x"\n', "agent.toml: $.peers.static[0]", "addres"),
        ('[[peers.static]]\nnode = "b"\naddress = "x"\n', "agent.toml: $.peers.static[0].address", "malformed"),
        ('[peers]\nlisten = "tcp://0.0.0.0:99999"\n', "agent.toml: $.peers.listen", "0 to 65535"),
        ('[peers]\nlisten = "pigeon://0.0.0.0:1"\n', "agent.toml: $.peers.listen", "no transport 'pigeon'"),
        ('[agent]\nsocket = "@"\n', "agent.toml: $.agent.socket", "is empty"),
        ("engine = 3\n", "agent.toml: $.engine", "is a section"),
        ("[engine\n", "agent.toml", "no TOML"),
        ("[failure]\nfailure_timeout = 0.0\n", "agent.toml: $.failure.failure_timeout", "0.2"),
        ("[failure]\nfailure_timeout = nan\n", "agent.toml: $.failure.failure_timeout", "0.2"),
        ("[failure]\nfailure_timeout = inf\n", "agent.toml: $.failure.failure_timeout", "3600"),
        ("[failure]\ndeadline = nan\n", "agent.toml: $.failure.deadline", ""),
        ("[failure]\ndeadline = 4.0\n", "agent.toml: $.failure.deadline", "shorter than failure.failure_timeout (5 s)"),
        ("[failure]\nfailure_timeout = 301\n", "agent.toml: $.failure.failure_timeout", "lower the other"),
        ("[failure]\ndeadline = 0\n", "agent.toml: $.failure.deadline", "> 0"),
        ("[failure]\ndeadline = -1.5\n", "agent.toml: $.failure.deadline", "> 0"),
        ("[failure]\ndeadline = nan\n", "agent.toml: $.failure.deadline", "> 0"),
        ("[failure]\ndeadline = inf\n", "agent.toml: $.failure.deadline", "1000000000"),
        ("[limits]\nhello_timeout = nan\n", "agent.toml: $.limits.hello_timeout", "> 0"),
        ('[peers]\nlisten = "tcp://nowhere"\n', "agent.toml: $.peers.listen", "no port"),
        ('[limits]\narena_bytes = "1MiB"\n', "agent.toml: $.limits.arena_bytes", "at least 32MiB"),
        ('[agent]\nnode = "a\\nb"\n', "agent.toml: $.agent.node", "has control characters"),
        ('[agent]\nnode = "a\\u2028b"\n', "agent.toml: $.agent.node", "has control characters"),
        (f'[agent]\nnode = "{"é" * 200}"\n', "agent.toml: $.agent.node", "has 400 bytes, at most 255 are allowed"),
        (
            f'[[peers.static]]\nnode = "{"é" * 200}"\naddress = "tcp://b:1"\n',
            "agent.toml: $.peers.static[0].node",
            "has 400 bytes, at most 255 are allowed",
        ),
        ('[agent]\nnode = "a\\u0000"\n', "agent.toml: $.agent.node", "has a NUL character"),
        ('[security]\nkey = "a\\u0000"\n', "agent.toml: $.security.key", "has a NUL character"),
        (
            '[[peers.static]]\nnode = "b\\u001b"\naddress = "tcp://10.0.0.2:1"\n',
            "agent.toml: $.peers.static[0].node",
            "has control characters",
        ),
        (f"[engine]\nthreads = {'9' * 5000}\n", "agent.toml", "agent.toml is no TOML"),
        (f"[engine]\nthreads = 0x{'f' * 5000}\n", "agent.toml: $.engine.threads", "is too large a number"),
        (f"[engine]\ntile_bytes = 0x{'f' * 5000}\n", "agent.toml: $.engine.tile_bytes", "is too large a number"),
        (f'[limits]\narena_bytes = "{"9" * 4300}TiB"\n', "agent.toml: $.limits.arena_bytes", "is too large a number"),
        (f'[limits]\narena_bytes = "{"9" * 5000}"\n', "agent.toml: $.limits.arena_bytes", "which is no size"),
        (f"version = 0x{'f' * 5000}\n", "agent.toml: $.version", "is too large a number"),
        (f"x = {'[' * 3000}{']' * 3000}\n", "agent.toml", "too deep"),
        (f"[agent]\nnode = {'[' * 50}{']' * 50}\n", "agent.toml: $.agent.node", "too deep"),
        (f"[agent]\nnode.{'a.' * 5000}a = 1\n", "agent.toml: $.agent.node", "too deep"),
        ('[metrics]\nhosts = ["a", "10.1.2.3:4124"]\n', "agent.toml: $.metrics.hosts[1]", "without a port"),
        ('[metrics]\nhosts = ["[::1]:80"]\n', "agent.toml: $.metrics.hosts[0]", "without a port"),
        ('[metrics]\nhosts = [""]\n', "agent.toml: $.metrics.hosts[0]", "no name that a request can ask for"),
        ('[metrics]\nhosts = ["http://a/"]\n', "agent.toml: $.metrics.hosts[0]", "no name that a request can ask for"),
    ],
)
def test_a_wrong_setting_says_where_and_what_is_allowed(text: str, path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "agent.toml", {}, {})
    assert caught.value.path == path
    assert str(caught.value).startswith(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["ALLREDUCED_ENGINE_THREAD", "ALLREDUCED_AGENT_NODES", "ALLREDUCED_LIMITS_X"])
def test_an_unknown_variable_of_a_known_section_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="valid: ") as caught:
        parse(None, "", {name: "1"}, {})
    assert caught.value.path == name


@pytest.mark.parametrize(
    "name", ["ALLREDUCED_AGENT_NODE", "ALLREDUCED_SECRET", "ALLREDUCED_ACCESS_USERS", "ALLREDUCED_LIMITS_ARENA_BYTES"]
)
def test_a_variable_that_is_no_utf_8_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(None, "", {name: "n\udcff"}, {})
    assert caught.value.path == name
    assert caught.value.message in (f"{name} is no UTF-8", f"{name} is 'n\\udcff', which is no size")


def test_an_option_that_is_no_utf_8_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^peers\.static is no UTF-8"):
        parse(None, "", {}, {"peers.static": "b\udcff=tcp://10.0.0.2:1"})


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(None, "", {"ALLREDUCED_ENGINE_THREADS": "many"}, {})
    assert caught.value.path == "ALLREDUCED_ENGINE_THREADS"
    assert str(caught.value).startswith("ALLREDUCED_ENGINE_THREADS is 'many': ")


def test_of_several_places_the_one_that_counts_is_named() -> None:
    text = '[peers]\nlisten = "tcp://127.0.0.1:1"\n'
    with pytest.raises(ConfigError, match=r"^ALLREDUCED_PEERS_LISTEN: .* has no port") as caught:
        parse(text, "agent.toml", {"ALLREDUCED_PEERS_LISTEN": "nowhere"}, {})
    assert caught.value.path == "ALLREDUCED_PEERS_LISTEN"
    with pytest.raises(ConfigError, match=r"^peers\.listen: "):
        parse(text, "agent.toml", {}, {"peers.listen": "nowhere"})


def test_a_variable_that_almost_names_a_setting_is_refused() -> None:
    for name, meant in (
        ("ALLREDUCED_ENGIN_THREADS", "ALLREDUCED_ENGINE_THREADS"),
        ("ALLREDUCED_LOG_LEVEL", "ALLREDUCED_AGENT_LOG_LEVEL"),
    ):
        with pytest.raises(ConfigError, match=f"there is no setting {name} .did you mean {meant}"):
            parse(None, "", {name: "1"}, {})


def test_variables_of_clients_and_launchers_are_no_settings() -> None:
    names = ("AGENT", "JOB", "JOIN", "LOCAL_RANK", "LOCAL_SIZE", "NODE", "NODES", "RANK", "SIZE", "SOCKET", "CHANNEL")
    assert parse(None, "", {f"ALLREDUCED_{name}": "1" for name in names}, {}) == Settings()


def test_the_description_is_the_same_settings_with_the_secret_masked() -> None:
    text = '[security]\nsecret = "abc"\n[engine]\ncpus = [1]\n[[peers.static]]\nnode = "b"\naddress = "tcp://h:1"\n'
    settings = parse(text, "", {}, {})
    described = settings.describe()
    assert "abc" not in described
    again = parse(described, "", {}, {"security.secret": "abc"})
    assert again == settings
    assert 'tile_bytes = "2MiB"' in described


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("8KiB", 8192), ("1.5 GiB", 3 << 29), ("2MB", 2_000_000), (" 1tib ", 1 << 40), ("0", 0)],
)
def test_sizes_are_read_in_human_units(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "1 XB", "one MiB", "1.2.3MiB", f"{'9' * 400}.0GiB"])
def test_what_is_no_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_size(text)


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the configuration /dev/zero is longer than \d+ bytes"):
        load("/dev/zero", {})


def test_a_secret_file_must_be_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from file\n")
    file.chmod(0o600)
    settings = parse(None, "", {}, {"security.secret_file": str(file)})
    assert secret_bytes(settings) == b"from file"
    file.chmod(0o644)
    with pytest.raises(AuthenticationError, match="mode 644"):
        secret_bytes(settings)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        secret_bytes(settings)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(str(tmp_path / "agent.toml"), {})


def test_the_usual_socket_is_in_the_runtime_directory() -> None:
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}) == "/run/user/7/allreduced/agent.sock"
    assert default_socket({}) == "/run/allreduced/agent.sock"


@pytest.mark.parametrize("name", ["agent.toml", "single.toml"])
def test_the_examples_are_valid(name: str) -> None:
    assert load(str(CONFIGS / name), {}).engine == Settings().engine


def test_the_full_example_names_every_setting_with_its_default() -> None:
    text = (CONFIGS / "agent.toml").read_text()
    settings = load(str(CONFIGS / "agent.toml"), {})
    for section in settings.__struct_fields__:
        for key in getattr(settings, section).__struct_fields__:
            assert key in text
    assert (settings.limits, settings.failure) == (Settings().limits, Settings().failure)


def test_check_prints_the_settings_as_toml_and_the_times_that_follow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALLREDUCED_FAILURE_FAILURE_TIMEOUT", "8")
    assert main(["agent", "--check"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["failure"] == {"failure_timeout": 8.0, "deadline": 300.0}
    for line in derived(8.0).describe():
        assert f"# {line}\n" in printed
    assert "# heartbeat = 1 s: " in printed


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('[access]\nusers = ["nobody-of-this-name"]\n', "access.users", "nobody-of-this-name"),
        ('[access]\ngroups = ["nobody-of-this-name"]\n', "access.groups", "nobody-of-this-name"),
        ('[access]\nsocket_group = "nobody-of-this-name"\n', "access.socket_group", "nobody-of-this-name"),
        ('[security]\nmode = "mtls"\n', "security.ca", "mtls"),
        ('[security]\nsecret = "a"\nsecret_file = "/none"\n', "security.secret_file", "both"),
    ],
)
def test_check_refuses_what_an_agent_would_not_start_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, place: str, words: str
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(text)
    assert main(["agent", "--config", str(config), "--check", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert place in error


def test_timeouts_that_contradict_name_both_keys_and_the_one_that_was_given() -> None:
    both = "[failure]\nfailure_timeout = 5.0\ndeadline = 4.0\n"
    for text, environ, place in (
        (both, {}, "agent.toml: $.failure.deadline"),
        ("[failure]\ndeadline = 4.0\n", {}, "agent.toml: $.failure.deadline"),
        ("[failure]\nfailure_timeout = 400.0\n", {}, "agent.toml: $.failure.failure_timeout"),
        (None, {"ALLREDUCED_FAILURE_FAILURE_TIMEOUT": "400"}, "ALLREDUCED_FAILURE_FAILURE_TIMEOUT"),
    ):
        with pytest.raises(
            ConfigError, match=r"failure\.deadline .* is shorter than failure\.failure_timeout"
        ) as caught:
            parse(text, "agent.toml", environ, {})
        assert caught.value.path == place
    equal = parse("[failure]\nfailure_timeout = 5.0\ndeadline = 5.0\n", "agent.toml", {}, {})
    assert equal.failure.deadline == equal.failure.failure_timeout


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_variables_hold_no_senseless_times(value: str) -> None:
    for name in ("ALLREDUCED_FAILURE_DEADLINE", "ALLREDUCED_FAILURE_FAILURE_TIMEOUT"):
        with pytest.raises(ConfigError) as caught:
            parse(None, "", {name: value}, {})
        assert caught.value.path == name
        assert str(caught.value).startswith(f"{name} is '{value}': ")


def peers(*listed: tuple[str, str], **own: str) -> str:
    """Return a configuration with these static peers."""
    lines = ["[agent]", f'node = "{own.pop("node", "a")}"', "[peers]"]
    lines += [f'{key} = "{value}"' for key, value in own.items()]
    for node, address in listed:
        lines += ["[[peers.static]]", f'node = "{node}"', f'address = "{address}"']
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        (peers(("b", "tcp://h:1"), ("b", "tcp://h:2")), "static[1].node", "'b' is listed twice"),
        (peers(("b", "tcp://h:1"), ("c", "tcp://H:01")), "static[1].address", "h:1 is listed twice, for 'b' and 'c'"),
        (peers(("b", "tcp://[::1]:1"), ("c", "tcp://[0::1]:1")), "static[1].address", "is listed twice"),
        (peers(("b", "inproc://x"), ("c", "inproc://x")), "static[1].address", "inproc://x is listed twice"),
        (peers(("b", "tcp://h:1"), ("a", "tcp://h:2")), "static[1].node", "'a' is this agent itself"),
        (peers(("b", "tcp://h:1"), listen="tcp://H:1"), "static[0].address", "is where this agent itself listens"),
        (peers(("b", "tcp://h:1"), advertise="tcp://h:1"), "static[0].address", "is where this agent itself listens"),
    ],
)
def test_a_peer_that_is_listed_twice_or_is_this_agent(text: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "agent.toml", {}, {})
    assert caught.value.path == f"agent.toml: $.peers.{key}"
    assert said in caught.value.message


def test_agents_that_differ_in_name_and_address_are_peers() -> None:
    text = peers(("b", "tcp://h:1"), ("c", "tcp://h:2"), listen="tcp://0.0.0.0:1", advertise="tcp://here:1")
    assert [peer.node for peer in parse(text, "agent.toml", {}, {}).peers.static] == ["b", "c"]


def test_a_file_may_say_its_version() -> None:
    assert parse("version = 1\n[engine]\nthreads = 1\n", "agent.toml", {}, {}).engine.threads == 1


def test_a_file_of_a_newer_version_is_refused_before_its_keys_are_judged() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("version = 2\n[unheard_of]\nx = 1\n", "agent.toml", {}, {})
    assert caught.value.path == "agent.toml: $.version"
    assert "is of version 2, this agent knows versions up to 1" in caught.value.message
    assert caught.value.hint == "upgrade allreduced on this node, or give it a configuration of its own version"


@pytest.mark.parametrize("version", ["0", "-1", "true", '"1"', "1.0", "[1]"])
def test_a_version_is_a_number(version: str) -> None:
    with pytest.raises(ConfigError, match=r"agent.toml: \$.version is .*, which is no version"):
        parse(f"version = {version}\n", "agent.toml", {}, {})

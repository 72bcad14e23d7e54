import dataclasses

import pytest

from pserver.config import EtcdAddress, ServerSettings, TrainerSettings, parse_address, parse_coordination
from pserver.errors import ConfigError

ENVIRON = {
    "PSERVER_ADDRESS": "from-environment:1",
    "PSERVER_RANK": "3",
    "PSERVER_WORLD_SIZE": "8",
    "PSERVER_TIMEOUT_S": "2.5",
    "PSERVER_TRANSPORT": "grpc",
}


def test_arguments_come_before_the_environment():
    arguments = {"rank": 0, "world_size": 2, "timeout_s": 9, "transport": "shm"}
    settings = TrainerSettings.resolve("argument:2", environ=ENVIRON, **arguments)
    assert settings == TrainerSettings(address="argument:2", **arguments)


def test_the_environment_comes_before_defaults():
    assert TrainerSettings.resolve(environ=ENVIRON) == TrainerSettings(
        address="from-environment:1", rank=3, world_size=8, timeout_s=2.5, transport="grpc"
    )


@pytest.mark.parametrize(
    "environ",
    [{}, dict.fromkeys(("PSERVER_RANK", "PSERVER_WORLD_SIZE", "PSERVER_TIMEOUT_S", "PSERVER_TRANSPORT"), "")],
)
def test_variables_that_are_unset_or_empty_leave_the_defaults(environ):
    assert TrainerSettings.resolve("a:1", environ=environ) == TrainerSettings(
        address="a:1", rank=-1, world_size=1, timeout_s=60.0, transport="auto"
    )


def test_without_an_environment_of_its_own_the_process_s_is_read(monkeypatch):
    for variable, value in ENVIRON.items():
        monkeypatch.setenv(variable, value)
    assert TrainerSettings.resolve(rank=1).address == "from-environment:1"


@pytest.mark.parametrize("environ", [{}, {"PSERVER_ADDRESS": ""}])
def test_without_any_address_the_message_says_how_to_give_one(environ):
    with pytest.raises(ConfigError, match="PSERVER_ADDRESS"):
        TrainerSettings.resolve(environ=environ)


@pytest.mark.parametrize(
    ("variable", "text", "kind"),
    [
        ("PSERVER_RANK", "first", "int"),
        ("PSERVER_RANK", "1.5", "int"),
        ("PSERVER_WORLD_SIZE", "two", "int"),
        ("PSERVER_TIMEOUT_S", "1 s", "float"),
    ],
)
def test_a_variable_of_another_type_is_refused_by_name(variable, text, kind):
    with pytest.raises(ConfigError, match=f"{variable} must be of type {kind}, but is '{text}'"):
        TrainerSettings.resolve("a:1", environ={variable: text})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": -2}, "rank must be 0 or more"),
        ({"rank": 2, "world_size": 2}, "world_size must be at least 1 and above rank"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"transport": "udp"}, r"transport must be one of \['auto', 'shm', 'tcp', 'grpc'\], but is 'udp'"),
        ({"transport": "SHM"}, "transport must be one of"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TrainerSettings.resolve("a:1", environ={}, **arguments)


def test_without_a_world_size_any_rank_may_join():
    assert TrainerSettings.resolve("a:1", rank=5, environ={}).rank == 5


def test_settings_are_frozen_and_keyword_only():
    settings = TrainerSettings.resolve("a:1", environ={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.rank = 3
    with pytest.raises(TypeError):
        ServerSettings("s0")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:7077", ("127.0.0.1", 7077)),
        ("host.example:1", ("host.example", 1)),
        ("h:65535", ("h", 65535)),
        ("[::1]:7077", ("[::1]", 7077)),
    ],
)
def test_an_address_has_host_and_port(text, parts):
    assert parse_address(text) == parts


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":7077", "host:0", "host:65536", "host:-1", "host:http", "host:7077 ", "host:²"]
)
def test_what_is_no_address_is_refused_and_shown(text):
    with pytest.raises(ConfigError, match="host:port") as refused:
        parse_address(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "endpoints", "prefix"),
    [
        ("etcd://h:2379/jobs/a", (("h", 2379),), "/jobs/a"),
        ("etcd://h1:2379,h2:2380/p/", (("h1", 2379), ("h2", 2380)), "/p"),
        ("etcd://[::1]:2379", (("[::1]", 2379),), "/pserver"),
    ],
)
def test_where_coordinators_agree_has_endpoints_and_a_prefix(text, endpoints, prefix):
    assert parse_coordination(text) == EtcdAddress(endpoints=endpoints, prefix=prefix)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:2379",
        "http://h:2379",
        "etcd:h:2379",
        "etcd://",
        "etcd://h",
        "etcd://h:2379,",
        "etcd://h:2379,/p",
        "etcd://h:2379/a//b",
        "etcd://h:2379/a b",
        "etcd://h:2379?tls=1",
    ],
)
def test_where_coordinators_cannot_agree_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="for example") as refused:
        parse_coordination(text)
    assert repr(text) in str(refused.value)


def test_addresses_are_checked_wherever_they_come_from():
    for resolve in (
        lambda: TrainerSettings.resolve("nowhere", environ={}),
        lambda: TrainerSettings.resolve(environ={"PSERVER_ADDRESS": "nowhere"}),
        lambda: ServerSettings(name="s1", join="nowhere"),
    ):
        with pytest.raises(ConfigError, match="'nowhere'"):
            resolve()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "needs a name"),
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"min_servers": 0}, "min_servers"),
        ({"trainer_lease_s": 0.0}, "trainer_lease_s"),
        ({"server_lease_s": -1.0}, "server_lease_s"),
        ({"server_lease_s": float("nan")}, "server_lease_s"),
    ],
)
def test_a_server_refuses_settings_that_make_no_sense_by_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**{"name": "s0", **arguments})


def test_a_server_listens_on_this_machine_only_unless_told_otherwise():
    settings = ServerSettings(name="s0")
    assert (settings.host, settings.port, settings.join, settings.min_servers) == ("127.0.0.1", 0, None, 1)

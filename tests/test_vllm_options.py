"""The connector's options: parsing, messages, and their documentation."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvnixl.agent import Agent
from kvnixl.compat import CompatibilityCheck
from kvnixl.errors import ConfigError
from kvnixl.handshake import HandshakeClient, HandshakeServer
from kvnixl.keys import generate_key_pair, write_key_pair
from kvnixl.metadata import MAX_LEASE_SLOTS
from kvnixl.producer import Producer
from kvnixl.reader import Reader
from kvnixl.vllm.options import OPTIONS, ConnectorOptions, options_table

DOCUMENT = Path(__file__).parents[1] / "docs" / "vllm-options.md"


def parse(
    extra_config: Any = None, environ: dict[str, str] | None = None, dp_index: int = 0
) -> ConnectorOptions:
    return ConnectorOptions.parse(extra_config, environ or {}, dp_index)


def refusal(extra_config: Any, environ: dict[str, str] | None = None, dp_index: int = 0) -> str:
    with pytest.raises(ConfigError) as raised:
        parse(extra_config, environ, dp_index)
    return str(raised.value)


# --- defaults -----------------------------------------------------------------------------------


def test_nothing_given_gives_the_defaults() -> None:
    options = parse({})
    assert options == parse(None)
    for name, option in OPTIONS.items():
        if name != "side_channel_advertised_host":  # is made from side_channel_host
            assert getattr(options, name) == option.default, name


def test_every_option_is_a_field_and_every_default_is_accepted() -> None:
    names = {field.name for field in dataclasses.fields(ConnectorOptions)}
    assert names - set(OPTIONS) == {"side_channel_host_source", "side_channel_port_source"}
    for option in OPTIONS.values():
        assert option.parse(option.default, "here") == option.default, option.name


def test_numbers_have_units_or_are_counts_and_all_have_bounds() -> None:
    for option in OPTIONS.values():
        if option.kind in ("int", "seconds"):
            assert option.minimum is not None, option.name
            assert option.maximum is not None, option.name
            assert math.isfinite(option.maximum), option.name
        assert (option.unit == "seconds") == (option.kind == "seconds"), option.name


@pytest.mark.parametrize(
    ("arguments", "accepts"),
    [
        (ConnectorOptions.agent_arguments, Agent.open),
        (ConnectorOptions.producer_arguments, Producer),
        (ConnectorOptions.reader_arguments, Reader),
        (ConnectorOptions.compat_arguments, CompatibilityCheck),
        (ConnectorOptions.server_arguments, HandshakeServer),
        (ConnectorOptions.client_arguments, HandshakeClient),
    ],
)
def test_arguments_are_those_of_the_parts_that_take_them(
    arguments: Callable[[ConnectorOptions], dict[str, Any]], accepts: Callable[..., Any]
) -> None:
    given = arguments(parse())
    parameters = inspect.signature(accepts).parameters
    assert set(given) <= set(parameters)
    for name, value in given.items():
        default = parameters[name].default
        # The client's own default is for callers without a Reader.
        if default is not inspect.Parameter.empty and name not in (
            "timeout",
            "advertised_host",
            "host_option",
            "port_option",
        ):
            assert value == default, name


def test_importing_options_does_not_import_vllm() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; "
        "import kvnixl.vllm.options as o; print(o.ConnectorOptions.parse({}, {}).kv_lease_slots)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("4096\n", 0), done.stderr


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "parsed"),
    [
        ("kv_lease_duration", 60, 60.0),
        ("kv_lease_duration", 1.5, 1.5),
        ("kv_lease_slots", 0, 0),
        ("kv_lease_slots", MAX_LEASE_SLOTS, MAX_LEASE_SLOTS),
        ("lease_verification", "require", "require"),
        ("kv_recompute_threshold", 64, 64),
        ("backends", ["UCX", "GDS"], ("UCX", "GDS")),
        ("num_threads", 4, 4),
        ("engine_ttl", 3600.0, 3600.0),
        ("enforce_handshake_compat", False, False),
        ("enable_cross_layers_blocks", "True", True),
        ("enable_cross_layers_blocks", "false", False),
        ("allowed_peers", ["10.0.0.0/8", "*.prefill.svc"], ("10.0.0.0/8", "*.prefill.svc")),
        ("allowed_peers", [], ()),
        ("allowed_peers", None, None),
        (
            "curve_server_secret_key",
            "/etc/kvnixl/server.key_secret",
            "/etc/kvnixl/server.key_secret",
        ),
    ],
)
def test_values_are_typed(name: str, given: Any, parsed: Any) -> None:
    value = getattr(parse({name: given}), {"engine_ttl": "idle_timeout"}.get(name, name))
    assert value == parsed
    assert type(value) is type(parsed)


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if o.kind in ("int", "seconds")])
def test_bounds_are_included_and_what_is_outside_is_refused(name: str) -> None:
    option = OPTIONS[name]
    assert option.minimum is not None
    assert option.maximum is not None
    step = 1 if option.kind == "int" else 0.001
    for bound in (option.minimum, option.maximum):
        assert getattr(parse({name: bound}), name) == bound
    for outside in (option.minimum - step, option.maximum + step):
        text = refusal({name: outside})
        assert text.startswith(f"{name} in kv_connector_extra_config: expected ")
        assert str(outside) in text
        assert option.unit in text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kv_lease_duration", "30", "a number of seconds from 0.1 to 604800, not '30'"),
        ("kv_lease_duration", math.nan, "not nan"),
        ("kv_lease_duration", math.inf, "not inf"),
        ("kv_lease_duration", True, "not True"),
        ("kv_lease_duration", None, "not None; leave it out for the default"),
        ("kv_recompute_threshold", 64.0, "a whole number of tokens from 0 to 2147483648, not 64.0"),
        ("kv_lease_slots", False, "a whole number from 0 to 16777216, not False"),
        ("lease_verification", "always", 'one of "prefer", "require", "off", not \'always\''),
        ("enforce_handshake_compat", 1, "true or false, not 1"),
        ("enforce_handshake_compat", "yes", "true or false, not 'yes'"),
        ("backends", "UCX", "a list of texts, not 'UCX'"),
        ("backends", [], "a list of texts, not []"),
        ("backends", ["UCX", 1], "a list of texts, not ['UCX', 1]"),
        ("allowed_peers", "10.0.0.1", "a list of texts, or null, not '10.0.0.1'"),
        ("allowed_peers", ["10.0.0.1/8"], "'10.0.0.1/8' is no host or network"),
        ("side_channel_host", "", "a text, not ''"),
        ("curve_server_key", 7, "the path of a file or directory, or null, not that value"),
    ],
)
def test_ill_typed_values_are_refused(name: str, value: Any, words: str) -> None:
    text = refusal({name: value})
    assert text.startswith(f"{name} in kv_connector_extra_config: ")
    assert words in text


def test_a_long_value_is_shortened() -> None:
    assert len(refusal({"lease_verification": "x" * 100_000})) < 400


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("kv_lease_durations", "kv_lease_duration"),
        ("lease_verificaton", "lease_verification"),
        ("KV_LEASE_SLOTS", "kv_lease_slots"),
        ("handshake_timeout_s", "handshake_timeout"),
        ("allowed_hosts", "allowed_peers"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(given: str, nearest: str) -> None:
    assert f"{given!r} is not an option; did you mean {nearest!r}?" in refusal({given: 1})


def test_a_name_near_to_none_is_answered_with_all() -> None:
    text = refusal({"zzz": 1})
    assert all(name in text for name in OPTIONS)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bidirectional_kv_xfer": True}, "does not read from decode engines; remove it"),
        ({"decoder_kv_blocks_ttl": 480}, "set kv_lease_duration"),
        ({"push_registration_timeout": 480}, "push mode"),
        ({"kv_role": "kv_both"}, "belongs one level up, beside kv_connector"),
        ({"idle_timeout": 60, "engine_ttl": 60}, "engine_ttl is another name for idle_timeout"),
        ({1: 2}, "1 is no name of an option"),
        (["kv_lease_slots"], "expected a JSON object, not ['kv_lease_slots']"),
    ],
)
def test_other_names_are_refused_with_a_remedy(config: Any, words: str) -> None:
    assert words in refusal(config)


def test_what_the_stock_connector_does_by_default_may_be_said() -> None:
    assert parse({"bidirectional_kv_xfer": False}) == parse()


# --- side channel -------------------------------------------------------------------------------

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


@pytest.mark.parametrize(
    ("config", "environ", "dp_index", "host", "port"),
    [
        ({}, {}, 0, "localhost", 5600),
        ({}, {}, 3, "localhost", 5603),
        ({}, {HOST: "10.0.0.7", PORT: "6000"}, 2, "10.0.0.7", 6002),
        ({}, {HOST: "", PORT: " "}, 0, "localhost", 5600),
        ({"side_channel_port": 7000}, {PORT: "6000"}, 2, "localhost", 7002),
        ({"side_channel_host": "10.0.0.8"}, {HOST: "10.0.0.7"}, 0, "10.0.0.8", 5600),
        ({"side_channel_port": 0}, {PORT: "6000"}, 2, "localhost", 0),
        ({"side_channel_host": "[::1]"}, {}, 0, "[::1]", 5600),
    ],
)
def test_host_and_port_come_from_the_options_then_the_environment(
    config: Any, environ: dict[str, str], dp_index: int, host: str, port: int
) -> None:
    options = parse(config, environ, dp_index)
    assert (options.side_channel_host, options.side_channel_port) == (host, port)
    assert options.advertised_host == host.strip("[]")


@pytest.mark.parametrize(
    ("config", "source"),
    [({}, HOST), ({"side_channel_host": "h"}, "side_channel_host in kv_connector_extra_config")],
)
def test_messages_of_the_server_name_what_the_user_sets(config: Any, source: str) -> None:
    assert parse(config).server_arguments()["host_option"] == source


@pytest.mark.parametrize("text", ["56OO", "-1", "5600.0", "65536", "9" * 5000])
def test_a_bad_port_in_the_environment_is_refused(text: str) -> None:
    message = refusal({}, {PORT: text})
    assert message.startswith(f"environment variable {PORT}: expected a whole number from 0 to 655")
    assert len(message) < 400


def test_a_port_beyond_the_last_one_is_refused() -> None:
    assert parse({"side_channel_port": 65535}).side_channel_port == 65535
    text = refusal({"side_channel_port": 65535}, dp_index=1)
    assert "port 65535 plus data-parallel rank 1 is above 65535; choose a lower port" in text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", "0:0:0:0:0:0:0:0"])
def test_an_address_of_all_interfaces_needs_another_one_to_advertise(host: str) -> None:
    text = refusal({}, {HOST: host})
    assert text.startswith(f"{HOST}: {host!r} listens on all interfaces")
    assert "set side_channel_advertised_host or VLLM_HOST_IP" in text
    options = parse({}, {HOST: host, "VLLM_HOST_IP": "10.0.0.7"})
    assert (options.side_channel_host, options.advertised_host) == (host, "10.0.0.7")
    options = parse(
        {"side_channel_host": host, "side_channel_advertised_host": "fd00::7"},
        {"VLLM_HOST_IP": "10.0.0.7"},
    )
    assert options.advertised_host == "fd00::7"


def test_the_address_that_peers_are_told_must_be_one() -> None:
    config = {"side_channel_host": "0.0.0.0"}
    assert "set VLLM_HOST_IP" in refusal(config, {"VLLM_HOST_IP": "0.0.0.0"})
    config = {"side_channel_advertised_host": "::"}
    assert "set side_channel_advertised_host in" in refusal(config)
    assert "neither an IP address nor a host name" in refusal({"side_channel_host": "a host"})


def test_the_hosts_own_address_is_not_advertised_instead_of_the_host() -> None:
    options = parse({"side_channel_host": "10.1.1.1"}, {"VLLM_HOST_IP": "10.0.0.7"})
    assert options.advertised_host == "10.1.1.1"


# --- keys ---------------------------------------------------------------------------------------


def test_keys_are_loaded_from_their_files(tmp_path: Path) -> None:
    server, client = generate_key_pair(), generate_key_pair()
    clients = tmp_path / "clients"
    write_key_pair(tmp_path, "server", server)
    write_key_pair(clients, "client", client)
    options = parse(
        {
            "curve_server_secret_key": str(tmp_path / "server.key_secret"),
            "curve_allowed_clients": str(clients),
            "curve_server_key": str(tmp_path / "server.key"),
            "curve_client_secret_key": str(clients / "client.key_secret"),
        }
    )
    server_keys, client_keys = options.load_server_keys(), options.load_client_keys()
    assert server_keys is not None
    assert client_keys is not None
    assert (server_keys.pair, server_keys.allowed_clients) == (server, {client.public})
    assert (client_keys.pair, client_keys.server_public) == (client, server.public)
    assert options.server_arguments()["curve"] == server_keys
    assert options.client_arguments()["curve"] == client_keys


def test_without_keys_nothing_is_encrypted() -> None:
    assert parse().server_arguments()["curve"] is None
    assert parse().client_arguments()["curve"] is None


@pytest.mark.parametrize(
    "name", [name for name, option in OPTIONS.items() if option.kind == "path"]
)
def test_a_key_instead_of_a_path_is_refused_and_not_shown(name: str) -> None:
    key = generate_key_pair().secret.decode()
    text = refusal({name: key})
    assert "is a key, not a path" in text
    assert key not in text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"curve_allowed_clients": "d"}, "set without curve_server_secret_key"),
        ({"curve_server_key": "f"}, "curve_client_secret_key is missing"),
        ({"curve_client_secret_key": "f"}, "curve_server_key is missing"),
    ],
)
def test_keys_that_need_each_other_are_given_together(config: Any, words: str) -> None:
    assert words in refusal(config)


def test_allowed_peers_reach_the_client() -> None:
    assert parse().client_arguments()["allowed"] is None
    allowed = parse({"allowed_peers": ["10.0.0.7"]}).client_arguments()["allowed"]
    allowed.check("10.0.0.7")
    with pytest.raises(Exception, match=re.escape("10.0.0.8")):
        allowed.check("10.0.0.8")


# --- documentation ------------------------------------------------------------------------------


def test_the_page_contains_exactly_this_table() -> None:
    text = DOCUMENT.read_text()
    tables = re.findall(r"^\| option \|.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    assert tables == [options_table().rstrip("\n")]


def test_the_table_has_one_row_of_five_cells_for_each_option() -> None:
    rows = options_table().splitlines()[2:]
    assert [re.findall(r"`(\w+)`", row)[0] for row in rows] == list(OPTIONS)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_every_key_option_is_named_as_in_the_security_page() -> None:
    text = DOCUMENT.with_name("security.md").read_text()
    named = set(re.findall(r"^\| `(curve_\w+)` \|", text, re.MULTILINE))
    assert named == {name for name in OPTIONS if name.startswith("curve_")}

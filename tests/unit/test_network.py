"""Addresses and what counts as loopback."""

from __future__ import annotations

import pytest

from horizon_server.errors import BadSetting
from horizon_server.network import Address, interface_of, is_loopback, parse_address


@pytest.mark.parametrize(
    ("text", "address", "printed"),
    [
        ("127.0.0.1:7171", Address(host="127.0.0.1", port=7171), "127.0.0.1:7171"),
        ("[::1]:0", Address(host="::1", port=0), "[::1]:0"),
        ("box.lab:65535", Address(host="box.lab", port=65535), "box.lab:65535"),
    ],
)
def test_host_and_port_are_read_and_printed(text: str, address: Address, printed: str) -> None:
    assert parse_address("grpc", text) == address
    assert str(address) == printed


@pytest.mark.parametrize("text", ["", "7171", "host", "host:", ":7171", "host:port", "host:65536", "host:-1"])
def test_anything_else_is_refused_by_the_settings_name(text: str) -> None:
    with pytest.raises(BadSetting, match=r"grpc .* is not HOST:PORT"):
        parse_address("grpc", text)


def test_the_interface_of_an_address_is_the_one_that_has_it() -> None:
    assert interface_of("127.0.0.1") == "lo"
    # Reserved for examples: no machine has it.
    with pytest.raises(BadSetting) as refused:
        interface_of("192.0.2.1")
    assert refused.value.message == (
        "setting fleet_address: no network interface of this machine has the address 192.0.2.1"
    )


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("box", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected

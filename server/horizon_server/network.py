"""Addresses: parsing HOST:PORT, and what counts as loopback."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from horizon_server.errors import BadSetting


@dataclass(frozen=True, kw_only=True)
class Address:
    """A host name or IP address, and a port from 0 (any free one) to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(setting: str, text: str) -> Address:
    """Return the address in HOST:PORT; IPv6 hosts stand in brackets.

    Raises:
        BadSetting: naming the setting, when it is not one.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise BadSetting(f"{setting} {text!r} is not HOST:PORT such as 127.0.0.1:7171 or 0.0.0.0:7171")
    return Address(host=host, port=int(port))


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""Where the daemon is and how it may be reached: an address with credentials, from options, then `HORIZON_*`, then the
profile file.

The file is `profiles.yaml` in the user's configuration folder (`HORIZON_CONFIG_DIR` overrides the folder), mode 0600,
because it contains tokens. A profile's token and CA belong to the profile's server: they are never sent to a server
that an option or the environment names.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from horizon_client.errors import BadConfig, NotFound, did_you_mean

DEFAULT_PORT = 7171
SYSTEM_CA = "system"
"""Instead of a CA file: trust the certificate authorities that gRPC ships with."""
NO_SERVER = "NO_SERVER"
"""Reason of the error that no server is configured."""

_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A daemon's address and the credentials for it.

    `ca_file` None means plain text, which is allowed on loopback only; the word `system` means the authorities gRPC
    ships with. `client_cert` and `client_key` are for daemons that ask clients for a certificate; both or neither.
    """

    server: str
    token: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "server", normal_address(self.server))
        # The message does not quote the token: it may end up in a log
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise BadConfig(
                "the token is not one line of printable characters; pass the file that `horizond token create` wrote"
            )
        if (self.client_cert is None) != (self.client_key is None):
            missing = "--client-key" if self.client_key is None else "--client-cert"
            raise BadConfig(f"a client certificate and its key belong together; pass {missing} too")
        if self.client_cert is not None and self.ca_file is None:
            raise BadConfig("a client certificate needs TLS: pass the daemon's CA file with --ca too")
        # In plain text anybody on the way could read the token and the data
        if self.ca_file is None and not self.is_loopback:
            raise BadConfig(
                f"{self.server} is not on this machine, so the connection needs TLS: pass the daemon's CA file with "
                f"--ca (horizond prints its path at the first start), or --ca {SYSTEM_CA} for a publicly signed "
                "certificate"
            )

    @property
    def host(self) -> str:
        """Host name or address, without brackets and port."""
        return self.server.rpartition(":")[0].strip("[]")

    @property
    def is_loopback(self) -> bool:
        """Whether the traffic never leaves this machine."""
        if self.host == "localhost":  # no other name is resolved, because an answer of DNS can be forged
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def root_certificates(self) -> bytes | None:
        """Return the PEM to trust, or None for gRPC's own; BadConfig when the file is unusable."""
        if self.ca_file is None or str(self.ca_file) == SYSTEM_CA:
            return None
        return read_ca_file(self.ca_file)

    def client_pair(self) -> tuple[bytes, bytes] | None:
        """Return key and certificate to show to the daemon, or None where it asks for none; BadConfig when a file is
        unusable."""
        if self.client_key is None or self.client_cert is None:
            return None
        key = _read_pem(self.client_key, "client key", b"PRIVATE KEY-----")
        return key, _read_pem(self.client_cert, "client certificate", b"-----BEGIN CERTIFICATE-----")


def _read_pem(path: Path, what: str, mark: bytes) -> bytes:
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise BadConfig(f"cannot read the {what} {path}: {error.strerror}") from error
    if mark not in pem:
        raise BadConfig(f"{path} contains no PEM {what}")
    return pem


def normal_address(text: str) -> str:
    """Return an address as HOST:PORT, IPv6 in brackets, the default port filled in; BadConfig for anything else."""
    # The colons of a bare IPv6 address are not those of a port
    bare_six = text.count(":") > 1 and not text.startswith("[")
    match = _ADDRESS.fullmatch(f"[{text}]" if bare_six else text)
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise BadConfig(f"{text!r} is not a server address; write HOST:PORT, such as gpubox:{DEFAULT_PORT}")
    return f"{'[' + match['six'] + ']' if match['six'] else match['host']}:{port}"


def read_ca_file(path: Path) -> bytes:
    """Return the content of a CA file; BadConfig when it cannot be read or contains no certificate."""
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise BadConfig(f"cannot read the CA file {path}: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise BadConfig(f"{path} contains no PEM certificate; pass the CA file that horizond wrote")
    return pem


def read_token_file(path: Path) -> str:
    """Return the token in a file; BadConfig when it cannot be read, or is not one line of text."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise BadConfig(f"cannot read the token file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not a token file: it contains bytes that are not ASCII text") from error
    if not _TOKEN.fullmatch(token):
        raise BadConfig(f"{path} is not a token file: it must contain the token alone, on one line")
    return token


def is_open_to_others(path: Path) -> bool:
    """Whether other users of this machine can read a file; not so of a pipe, as of `--token-file <(command)`."""
    mode = path.stat().st_mode
    return os.name == "posix" and stat.S_ISREG(mode) and bool(mode & 0o077)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One daemon the user has logged in to."""

    name: str
    server: str
    token: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    """A profile without its token."""

    name: str
    server: str
    ca_file: str | None
    in_use: bool


class ProfileFile:
    """The profiles of one user. Reads on every call; a write replaces the whole file atomically."""

    def __init__(self) -> None:
        override = os.environ.get("HORIZON_CONFIG_DIR")
        self.folder = Path(override) if override else user_config_path("horizon")
        self.path = self.folder / "profiles.yaml"

    def profiles(self) -> list[Profile]:
        """Return all profiles by name."""
        found = []
        for name, entry in sorted(self._read()["profiles"].items()):
            if not isinstance(entry, Mapping) or not isinstance(entry.get("server"), str):
                raise BadConfig(f"{self.path}: profile {name!r} has no server; log in again with --profile {name}")
            token, ca_file = entry.get("token"), entry.get("ca_file")
            found.append(
                Profile(
                    name=str(name),
                    server=entry["server"],
                    token=None if token is None else str(token),
                    ca_file=Path(str(ca_file)) if ca_file else None,
                    client_cert=_path_of(entry.get("client_cert")),
                    client_key=_path_of(entry.get("client_key")),
                )
            )
        return found

    def summaries(self) -> list[ProfileSummary]:
        """Return all profiles by name, without tokens."""
        current = self.current_name()
        return [
            ProfileSummary(
                name=p.name, server=p.server, ca_file=str(p.ca_file) if p.ca_file else None, in_use=p.name == current
            )
            for p in self.profiles()
        ]

    def current_name(self) -> str | None:
        """Return the name of the profile in use, or None before the first login."""
        current = self._read()["current"]
        return str(current) if current else None

    def get(self, name: str) -> Profile:
        """Return one profile; NotFound with similar names when there is none of that name."""
        by_name = {profile.name: profile for profile in self.profiles()}
        if name in by_name:
            return by_name[name]
        hint = did_you_mean(name, by_name) or f"profiles: {', '.join(by_name)}"
        login = "log in with: horizon login HOST:PORT --token-file FILE"
        raise NotFound(f"there is no profile {name!r}; {hint if by_name else login}")

    def of_server(self, server: str, name: str) -> Profile | None:
        """Return the profile of a server: `name`, else the one in use, else any; None when there is none."""
        address, current = normal_address(server), self.current_name()
        found = [profile for profile in self.profiles() if normal_address(profile.server) == address]
        return min(found, key=lambda profile: (profile.name != name, profile.name != current), default=None)

    def save(self, profile: Profile) -> None:
        """Store `profile` with a copy of its CA file, and make it the current one."""
        if not _NAME.fullmatch(profile.name):
            raise BadConfig(f"{profile.name!r} is not a valid profile name; use letters, digits, '.', '_' and '-'")
        content = self._read()
        ca_file = profile.ca_file
        if ca_file is not None and str(ca_file) != SYSTEM_CA:
            # A copy, because the original is often in a download folder
            copy = self.folder / f"ca-{profile.name}.pem"
            _write_private(copy, read_ca_file(ca_file))
            ca_file = copy
        # Of the client's certificate only the places: a key is not copied, and certificates are renewed where they are
        entry = {
            "server": profile.server,
            "token": profile.token,
            "ca_file": ca_file,
            "client_cert": profile.client_cert,
            "client_key": profile.client_key,
        }
        content["profiles"][profile.name] = {key: str(value) for key, value in entry.items() if value is not None}
        content["current"] = profile.name
        self._write(content)

    def use(self, name: str) -> None:
        """Make `name` the current profile."""
        self.get(name)  # refuses an unknown name
        self._write({**self._read(), "current": name})

    def remove(self, name: str) -> None:
        """Remove one profile with its token and CA file."""
        profile = self.get(name)
        content = self._read()
        del content["profiles"][name]
        current = None if content["current"] == name else content["current"]
        self._write({**content, "current": current})
        # Only the copy that `save` made, never a file of the user's
        if profile.ca_file == self.folder / f"ca-{name}.pem":
            profile.ca_file.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        import yaml  # only here, because `horizon job --help` imports this module

        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {"current": None, "profiles": {}}
        except OSError as error:
            raise BadConfig(f"cannot read {self.path}: {error.strerror}") from error
        # As ssh does with keys: refuse rather than leak
        if is_open_to_others(self.path):
            raise BadConfig(f"{self.path} contains tokens and other users can read it; run: chmod 600 {self.path}")
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise BadConfig(f"{self.path} is not valid YAML; remove it and log in again") from error
        if not isinstance(content, dict) or not isinstance(content.get("profiles"), dict):
            raise BadConfig(f"{self.path} is not a profile file; remove it and log in again")
        return {"current": content.get("current"), "profiles": content["profiles"]}

    def _write(self, content: Mapping[str, Any]) -> None:
        import yaml

        _write_private(self.path, yaml.safe_dump(dict(content), sort_keys=True).encode())


def resolve_endpoint(
    server: str | None = None,
    *,
    token: str | None = None,
    ca_file: str | Path | None = None,
    client_cert: str | Path | None = None,
    client_key: str | Path | None = None,
    profile: str | None = None,
) -> Endpoint:
    """Return the daemon to connect to; what is not given comes from the environment, then from the profile.

    Raises:
        BadConfig: when no server is configured, or the configuration is unusable.
        NotFound: when the named profile does not exist.
    """
    by_profile = profile is not None and server is None  # a profile given as an option overrides the whole environment
    environment: Mapping[str, str] = {} if by_profile else os.environ
    given_server = server or environment.get("HORIZON_SERVER") or None
    given_token = token or environment.get("HORIZON_TOKEN") or None
    given_ca = str(ca_file or environment.get("HORIZON_CA") or "") or None
    cert = _path_of(client_cert or environment.get("HORIZON_CLIENT_CERT"))
    key = _path_of(client_key or environment.get("HORIZON_CLIENT_KEY"))
    file = ProfileFile()
    name = profile or os.environ.get("HORIZON_PROFILE") or None
    # With a server given, the profile in use only adds the token of that same server
    if name is None and (given_server is None or file.path.exists()):
        name = file.current_name()
    chosen = file.get(name) if name else None
    address = given_server or (chosen.server if chosen else None)
    if address is None:
        raise BadConfig(
            "no server is configured; log in with: horizon login HOST:PORT --token-file FILE, or set HORIZON_SERVER",
            reason=NO_SERVER,
        )
    # A profile's token is never sent to a server that was named in another way
    if chosen is not None and normal_address(chosen.server) == normal_address(address):
        given_token = given_token or chosen.token
        given_ca = given_ca or (str(chosen.ca_file) if chosen.ca_file else None)
        if cert is None and key is None:
            cert, key = chosen.client_cert, chosen.client_key
    return Endpoint(server=address, token=given_token, ca_file=_path_of(given_ca), client_cert=cert, client_key=key)


def _path_of(value: object) -> Path | None:
    return Path(str(value)).expanduser() if value else None


def _write_private(path: Path, content: bytes) -> None:
    """Replace `path` atomically by a file that only its owner can read."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes it 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a crash may leave the new name with no content
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise BadConfig(f"cannot write {path}: {error.strerror}") from error

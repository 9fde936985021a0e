"""TLS: the daemon's own CA is trusted, another is not, and what went wrong is said."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest
from click.testing import Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from horizon_client import BadEndpoint, Client, Unavailable
from horizon_client.connection import RetryPolicy
from horizon_client.rpc_errors import from_rpc

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]
ONCE = RetryPolicy(max_attempts=1)


def _self_signed(address: str = "127.0.0.1") -> tuple[bytes, bytes]:
    """Return key and certificate for an address, valid today."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "horizond test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(pem)


@pytest.fixture
def own_ca(daemon: Daemon, tmp_path: Path) -> Iterator[Path]:
    """Restart the line with TLS and return its CA file."""
    daemon.line.stop()
    daemon.line.tls = _self_signed()
    daemon.line.start()
    path = tmp_path / "ca.pem"
    path.write_bytes(daemon.line.tls[1])
    yield path


def test_own_ca_is_trusted(daemon: Daemon, own_ca: Path) -> None:
    with Client(daemon.address, token=daemon.token, ca_file=own_ca) as client:
        assert client.node.status().user == "ada"


def test_other_ca_is_not(daemon: Daemon, own_ca: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(_self_signed()[1])
    client = Client(daemon.address, token=daemon.token, ca_file=other, unary_retry=ONCE)
    with client, pytest.raises(Unavailable, match="not signed by the CA file in use"):
        client.node.status()
    assert daemon.calls == []


def test_a_handshake_that_fails_is_one_error_and_no_line_of_grpc(
    daemon: Daemon, own_ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    other = tmp_path / "other.pem"
    other.write_bytes(_self_signed()[1])
    script = (
        "import sys\n"
        "from horizon_client import Client, Unavailable\n"
        "try:\n"
        "    with Client(sys.argv[1], token='x', ca_file=sys.argv[2]) as client:\n"
        "        client.node.status()\n"
        "except Unavailable as error:\n"
        "    print(error.message)\n"
    )
    command = [sys.executable, "-c", script, daemon.address, str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "not signed by the CA file in use" in done.stdout
    assert done.stderr == ""


def test_plain_text_to_a_tls_port_hints_at_the_ca(daemon: Daemon, own_ca: Path) -> None:
    patient = RetryPolicy(max_attempts=100, first_wait_s=60, longest_wait_s=60, max_elapsed_s=6000)
    client = Client(daemon.address, token=daemon.token, unary_retry=patient)
    words = rf"horizond at {daemon.address} uses TLS, and no CA file is known for it; pass it with --ca"
    with client, pytest.raises(BadEndpoint, match=words):
        client.node.status()  # the first retry would outlast the test


@pytest.mark.parametrize("profile", ["default", "other"])
def test_a_later_login_keeps_the_ca(run: Run, daemon: Daemon, own_ca: Path, profile: str) -> None:
    login = ("login", daemon.address, "--token-file", "-")
    assert run(*login, "--ca", str(own_ca), stdin=daemon.token).stderr == ""
    own_ca.unlink()
    again = run(*login, "--profile", profile, stdin=daemon.token)
    assert (again.exit_code, again.stderr) == (0, "using the CA of profile default\n")
    assert f"profile {profile}" in again.stdout
    listed = run("--profile", profile, "job", "list")
    assert (listed.exit_code, listed.stderr) == (0, ""), "the profile has the CA"


def test_another_host_name_is_explained_with_the_names_that_work(daemon: Daemon, tmp_path: Path) -> None:
    daemon.line.stop()
    daemon.line.tls = _self_signed("192.0.2.7")
    daemon.line.start()
    (tmp_path / "ca.pem").write_bytes(daemon.line.tls[1])
    with Client(daemon.address, token=daemon.token, ca_file=tmp_path / "ca.pem") as client:
        with pytest.raises(BadEndpoint) as caught:
            client.node.status()
        with pytest.raises(BadEndpoint):
            list(client.jobs.watch("x"))
    assert caught.value.message == (
        f"the certificate of horizond at {daemon.address} is not valid for 127.0.0.1; it is valid for 192.0.2.7: "
        "connect to one of "
        "these, or add '127.0.0.1' to tls_names in the settings of horizond and restart it"
    )
    assert caught.value.exit_code == 5
    assert daemon.calls == []


def test_a_certificate_error_is_not_retried(daemon: Daemon, own_ca: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(_self_signed()[1])
    patient = RetryPolicy(max_attempts=100, first_wait_s=60, longest_wait_s=60, max_elapsed_s=6000)
    client = Client(daemon.address, token=daemon.token, ca_file=other, unary_retry=patient, stream_retry=patient)
    with client, pytest.raises(BadEndpoint):
        client.node.status()  # the first retry would outlast the test


def test_the_command_prints_one_line_and_no_log_of_grpc(daemon: Daemon, own_ca: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(_self_signed()[1])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GRPC_", "HORIZON_"))}
    done = subprocess.run(
        [sys.executable, "-m", "horizon_client", "node", "status", "--server", daemon.address, "--ca", str(other)],
        env=environment | {"HORIZON_CONFIG_DIR": str(tmp_path / "none"), "HORIZON_TOKEN": daemon.token},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: cannot trust horizond at {daemon.address}: its certificate is not signed by the CA")


@pytest.mark.parametrize("secure", [False, True])
def test_the_web_port_is_recognised(daemon: Daemon, own_ca: Path, secure: bool, tmp_path: Path) -> None:
    certificate = tmp_path / "both.pem"
    assert daemon.line.tls is not None
    certificate.write_bytes(daemon.line.tls[0] + daemon.line.tls[1])
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        if secure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            context.set_alpn_protocols(["http/1.1"])
            web.socket = context.wrap_socket(web.socket, server_side=True)
        threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True).start()
        address = f"127.0.0.1:{web.server_port}"
        client = Client(address, token=daemon.token, ca_file=own_ca if secure else None)
        with client, pytest.raises(BadEndpoint, match=f"{address} does not speak gRPC: .* is a web .HTTP. port"):
            client.node.status()
        web.shutdown()


def test_the_default_web_port_names_the_default_grpc_port() -> None:
    details = "Failed parsing HTTP/2 (Trying to connect an http1.x server (HTTP status 404))"
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details, debug_error_string=None
    )
    assert "7172 is the web port, gRPC is 7171" in from_rpc(error, "127.0.0.1:7172").message


def test_a_text_of_grpc_itself_is_never_shown_raw() -> None:
    empty = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNKNOWN, empty, empty, details="Unexpected <class 'KeyError'>: 7", debug_error_string=None
    )
    problem = from_rpc(error, "gpubox:7171")
    assert problem.message == "horizond at gpubox:7171 failed unexpectedly (UNKNOWN); its log says why"
    assert problem.__notes__ == ["gRPC UNKNOWN: Unexpected <class 'KeyError'>: 7"], "a traceback has it"

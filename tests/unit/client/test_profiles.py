"""Which daemon is spoken to, and with what: flag, environment, profile; plain text on loopback only."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from horizon_client import BadConfig, NotFound
from horizon_client.cli.session import token_of
from horizon_client.profiles import Endpoint, Profile, ProfileFile, normal_address, read_token_file, resolve_endpoint

PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


@pytest.fixture(autouse=True)
def _own_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HORIZON_SERVER", "HORIZON_TOKEN", "HORIZON_CA", "HORIZON_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HORIZON_CONFIG_DIR", str(tmp_path / "config"))


@pytest.fixture
def ca_file(tmp_path: Path) -> Path:
    """A file that looks like a CA."""
    path = tmp_path / "ca.pem"
    path.write_text(PEM)
    return path


def test_saved_profile_is_private_and_keeps_its_own_ca(ca_file: Path) -> None:
    ProfileFile().save(Profile(name="box", server="gpubox:7171", token="t1", ca_file=ca_file))
    ca_file.unlink()

    path = ProfileFile().path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    endpoint = resolve_endpoint()
    assert (endpoint.server, endpoint.token) == ("gpubox:7171", "t1")
    assert endpoint.root_certificates() == PEM.encode()
    assert sorted(p.name for p in path.parent.iterdir()) == ["ca-box.pem", "profiles.yaml"]


def test_order_is_flag_then_environment_then_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ProfileFile()
    file.save(Profile(name="one", server="127.0.0.1:1", token="t1"))
    file.save(Profile(name="two", server="127.0.0.1:2", token="t2"))
    assert resolve_endpoint().server == "127.0.0.1:2"  # the last login is in use
    monkeypatch.setenv("HORIZON_PROFILE", "one")
    assert resolve_endpoint().server == "127.0.0.1:1"
    monkeypatch.setenv("HORIZON_SERVER", "127.0.0.1:3")
    monkeypatch.setenv("HORIZON_TOKEN", "t3")
    assert (resolve_endpoint().server, resolve_endpoint().token) == ("127.0.0.1:3", "t3")
    by_flag = resolve_endpoint("127.0.0.1:4", token="t4")
    assert (by_flag.server, by_flag.token) == ("127.0.0.1:4", "t4")
    by_profile = resolve_endpoint(profile="two")
    assert (by_profile.server, by_profile.token) == ("127.0.0.1:2", "t2")


def test_token_of_a_profile_is_never_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ProfileFile().save(Profile(name="one", server="127.0.0.1:1", token="secret"))
    assert resolve_endpoint("127.0.0.1:2").token is None
    assert resolve_endpoint("127.0.0.1:1").token == "secret"
    monkeypatch.setenv("HORIZON_SERVER", "127.0.0.1:2")
    assert resolve_endpoint().token is None


def test_use_and_summaries() -> None:
    file = ProfileFile()
    file.save(Profile(name="one", server="127.0.0.1:1", token="t1"))
    file.save(Profile(name="two", server="127.0.0.1:2", token="t2"))
    file.use("one")
    assert [(p.name, p.in_use) for p in file.summaries()] == [("one", True), ("two", False)]
    assert "t1" not in repr(file.summaries())
    assert "t1" not in repr(file.profiles())
    with pytest.raises(NotFound, match="no profile 'three'; profiles: one, two"):
        file.use("three")


def test_nothing_configured_says_what_to_do() -> None:
    with pytest.raises(BadConfig, match="horizon login HOST:PORT"):
        resolve_endpoint()


@pytest.mark.parametrize("content", ["- a", "profiles: 3", "{", "profiles: {one: 3}\ncurrent: one"])
def test_a_broken_profile_file_is_one_message(content: str) -> None:
    path = ProfileFile().path
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(BadConfig, match="log in again"):
        resolve_endpoint()


def test_readable_by_others_is_refused() -> None:
    file = ProfileFile()
    file.save(Profile(name="one", server="127.0.0.1:1", token="t1"))
    file.path.chmod(0o644)
    with pytest.raises(BadConfig, match="chmod 600"):
        resolve_endpoint()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpubox", "gpubox:7171"),
        ("gpubox:1", "gpubox:1"),
        ("127.0.0.1:7171", "127.0.0.1:7171"),
        ("::1", "[::1]:7171"),
        ("[::1]:9", "[::1]:9"),
        ("[fe80::1]", "[fe80::1]:7171"),
    ],
)
def test_addresses(text: str, expected: str) -> None:
    assert normal_address(text) == expected


@pytest.mark.parametrize("text", ["", "host:", "host:0", "host:65536", "http://host:1", "a b:1", "host:x", "unix:/x"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(BadConfig, match="write HOST:PORT"):
        normal_address(text)


@pytest.mark.parametrize("server", ["localhost:1", "127.0.0.1:1", "127.8.9.1:1", "[::1]:1"])
def test_plain_text_is_fine_on_loopback(server: str) -> None:
    assert Endpoint(server=server).is_loopback


@pytest.mark.parametrize(
    "server", ["gpubox:1", "10.0.0.1:1", "0.0.0.0:1", "127.0.0.1.example.org:1", "[::2]:1", "localhost.example.org:1"]
)
def test_plain_text_is_refused_beyond(server: str, ca_file: Path) -> None:
    with pytest.raises(BadConfig, match="needs TLS: pass the daemon's CA file with --ca"):
        Endpoint(server=server)
    assert not Endpoint(server=server, ca_file=ca_file).is_loopback


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("abc\n")
    assert read_token_file(path) == "abc"
    for content in (b"", b"a b\n", b"a\nb\n", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(BadConfig, match="not a token file"):
            read_token_file(path)
    with pytest.raises(BadConfig, match="cannot read the token file"):
        read_token_file(tmp_path / "none")


def test_token_is_not_shown() -> None:
    assert "secret" not in repr(Endpoint(server="localhost:1", token="secret"))
    with pytest.raises(BadConfig) as caught:
        Endpoint(server="localhost:1", token="sec ret")
    assert "sec" not in caught.value.message


@pytest.mark.parametrize("content", ["", "not a certificate"])
def test_bad_ca_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.pem"
    path.write_text(content)
    with pytest.raises(BadConfig, match="contains no PEM certificate"):
        Endpoint(server="gpubox:1", ca_file=path).root_certificates()


def test_a_server_is_found_among_the_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZON_CONFIG_DIR", str(tmp_path))
    file = ProfileFile()
    assert file.of_server("gpubox", "default") is None
    for name in ("a", "b", "c"):
        file.save(Profile(name=name, server="gpubox:7171", ca_file=Path("system")))
    file.save(Profile(name="other", server="elsewhere", ca_file=Path("system")))
    file.use("b")
    found = [file.of_server("gpubox", name) for name in ("a", "default", "other")]
    assert [profile and profile.name for profile in found] == ["a", "b", "b"], "the named one, else the one in use"


def test_a_token_file_that_others_can_read_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text("hzn_x\n")
    file.chmod(0o600)
    assert token_of(file) == "hzn_x"
    assert capsys.readouterr().err == ""
    file.chmod(0o644)
    assert token_of(file) == "hzn_x"
    assert f"other users of this machine can read your token; run: chmod 600 {file}" in capsys.readouterr().err
    assert token_of(file, quiet=True) == "hzn_x"
    assert capsys.readouterr().err == ""

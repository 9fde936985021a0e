"""Settings: flags over environment over file over defaults, and wrong ones named."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from horizon_server.errors import BadSetting
from horizon_server.main import feed_watchdog
from horizon_server.settings import child_environment, load_settings, watchdog_limit_s


def test_flags_come_before_the_environment_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "horizond.toml"
    config.write_text('grpc = "127.0.0.1:1"\nhttp = "127.0.0.1:2"\nlog_level = "debug"\nmax_restarts = 7\n')
    monkeypatch.setenv("HORIZOND_HTTP", "127.0.0.1:3")
    monkeypatch.setenv("HORIZOND_LOG_LEVEL", "error")
    settings = load_settings(config, state_dir=tmp_path, log_level="warning", grpc=None)
    assert (settings.grpc, settings.http, settings.log_level) == ("127.0.0.1:1", "127.0.0.1:3", "warning")
    assert (settings.max_restarts, settings.state_dir) == (7, tmp_path)


@pytest.mark.parametrize(
    ("text", "named"),
    [('colour = "red"', "colour"), ("max_restarts = -1", "max_restarts"), ('log_level = "loud"', "log_level")],
)
def test_a_wrong_key_is_named(tmp_path: Path, text: str, named: str) -> None:
    config = tmp_path / "horizond.toml"
    config.write_text(text)
    with pytest.raises(BadSetting, match=f"setting {named}: "):
        load_settings(config)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "fleet_address"),
        ({"fleet_key_file": "/etc/fleet.pem"}, "fleet_address"),
        ({"fleet_address": "127.0.0.1"}, "fleet_key_file"),
    ],
)
def test_further_nodes_need_an_address_and_a_key(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(BadSetting, match=f"setting {missing}: nodes need it"):
        load_settings(nodes=("10.0.0.2:7173",), **given)
    # A node that serves others has none of its own.
    assert load_settings(**given).nodes == ()
    whole: dict[str, Any] = {"fleet_address": "127.0.0.1", "fleet_key_file": "/etc/fleet.pem"}
    assert load_settings(nodes="a:1,b:2", **whole).nodes == ("a:1", "b:2")


KEY: dict[str, Any] = {"fleet_address": "127.0.0.1", "fleet_key_file": "/etc/fleet.pem"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"boxes": "b=h:1"}, "setting fleet_key_file: boxes need it"),
        ({"box_port": 7174}, "setting fleet_address: box_port needs it"),
        ({"box_port": 7174, "fleet_address": "127.0.0.1"}, "setting fleet_key_file: box_port needs it"),
        ({"boxes": "b", **KEY}, "'b' is not NAME=HOST:PORT such as box2=10.0.0.2:7174"),
        ({"boxes": "b=h:x", **KEY}, "'b=h:x' is not NAME=HOST:PORT"),
        ({"boxes": "b c=h:1", **KEY}, "'b c=h:1' is not NAME=HOST:PORT"),
        ({"boxes": "b=h:1,b=i:1", **KEY}, "b is there twice; each box has a name of its own"),
        ({"boxes": "b=h:1", "box_name": "b", **KEY}, "setting boxes: b is the name of this machine"),
        ({"box_name": "a b"}, "setting box_name: "),
    ],
)
def test_boxes_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=re.escape(message)):
        load_settings(**given)


def test_boxes_have_names_and_addresses() -> None:
    settings = load_settings(boxes="box2=10.0.0.2:7174,box3=[fd00::3]:7174", box_port=0, **KEY)
    assert settings.boxes == ("box2=10.0.0.2:7174", "box3=[fd00::3]:7174")
    assert settings.box_name


@pytest.mark.parametrize("written", ["gpubox, gpubox.lab.edu", '["gpubox", "gpubox.lab.edu"]'])
def test_a_list_in_the_environment_is_separated_by_commas_or_is_json(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZOND_TLS_NAMES", written)
    monkeypatch.setenv("HORIZOND_MODEL_ROOTS", "/srv/models")
    settings = load_settings(state_dir=tmp_path)
    assert settings.tls_names == ("gpubox", "gpubox.lab.edu")
    assert settings.model_roots == (Path("/srv/models"),)


@pytest.mark.parametrize(
    ("folders", "why"),
    [
        (("nvme0",), "nvme0 is not an absolute folder; write all of its path"),
        (("/nvme0", "/nvme0/"), "/nvme0 is there twice; write one folder for each drive"),
    ],
)
def test_drives_are_absolute_folders_of_their_own(folders: tuple[str, ...], why: str) -> None:
    with pytest.raises(BadSetting, match=f"setting tier_dirs: {why}"):
        load_settings(tier_dirs=folders)


def test_a_list_in_the_environment_that_is_not_json_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZOND_TLS_NAMES", '["gpubox"')
    with pytest.raises(BadSetting, match="setting tls_names: "):
        load_settings()


@pytest.mark.parametrize(("given", "missing"), [("tls_cert", "tls_key"), ("tls_key", "tls_cert")])
def test_a_certificate_without_its_key_is_refused(given: str, missing: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=f"setting {missing}: a certificate and its key belong together"):
        load_settings(**{given: tmp_path / "file.pem"})


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="does not exist"):
        load_settings(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(BadSetting, match="cannot be read as TOML"):
        load_settings(tmp_path / "bad.toml")


def test_children_get_no_daemon_settings_and_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZOND_LOG_LEVEL", "debug")
    environment = child_environment()
    assert not any(name.startswith("HORIZOND_") for name in environment)
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_the_shell_of_the_daemon_does_not_choose_the_threads_that_a_job_multiplies_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "8")
    assert child_environment()["MKL_NUM_THREADS"] == "1"


def test_every_wrong_setting_is_named(tmp_path: Path) -> None:
    config = tmp_path / "horizond.toml"
    config.write_text("num_threads = 'many'\ngrcp = '127.0.0.1:0'\n")
    with pytest.raises(BadSetting) as caught:
        load_settings(config)
    assert [violation.description.split(":")[0] for violation in caught.value.violations] == [
        "setting num_threads",
        "setting grcp",
    ]


async def test_systemd_gets_signs_of_life_where_it_wants_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert watchdog_limit_s() == 0.0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
        assert watchdog_limit_s() == 0.0, "it is for another process"
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        assert watchdog_limit_s() == 0.03
        feeding = asyncio.create_task(feed_watchdog())
        for _ in range(3):
            assert await asyncio.get_running_loop().sock_recv(systemd, 100) == b"WATCHDOG=1"
        feeding.cancel()
        await asyncio.wait([feeding])


def test_networks_of_webhooks_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZOND_WEBHOOK_NETWORKS", "10.1.0.0/16, fd00::/8")
    assert load_settings().webhook_networks == ("10.1.0.0/16", "fd00::/8")
    monkeypatch.setenv("HORIZOND_WEBHOOK_NETWORKS", "10.1.2.3/16")
    with pytest.raises(
        BadSetting, match=r"webhook_networks: .*has host bits set; write networks such as 10\.1\.0\.0/16"
    ):
        load_settings()
    monkeypatch.delenv("HORIZOND_WEBHOOK_NETWORKS")
    for url in ("gpubox", "ftp://gpubox", "https://gpubox/?a=1"):
        with pytest.raises(BadSetting, match="public_url"):
            load_settings(public_url=url)

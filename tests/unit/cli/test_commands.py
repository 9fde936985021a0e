"""The `horizond` command line, without a daemon: help, accounts, plan, doctor, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests.support.hub import used_hub

from horizon_server.cli import exit_code, horizond, run
from horizon_server.cli.accounts import parse_lifetime
from horizon_server.db.database import migrate
from horizon_server.demo.recipe import write_demo_model
from horizon_server.errors import BadSetting, DiskFull, HorizonError, NotAllowed, NotFound, Unauthenticated, WorkerDied
from horizon_server.planning.machine import Gpu
from horizon_server.settings import load_settings
from horizon_server.store.drive_files import DriveSpeed

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run a command line over a state folder of its own; returns exit code, stdout and stderr."""

    migrate(tmp_path / "state" / "horizon.db")

    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["horizond", *arguments, "--state-dir", str(tmp_path / "state")])
        code = run()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, found in group.commands.items():
        if isinstance(found, click.Group):
            yield from _commands(found, (*path, name))
        else:
            yield (*path, name), found


EVERY_COMMAND = dict(_commands(horizond))


def test_the_promised_commands_are_there() -> None:
    promised = (
        "serve; demo; user add; user set; user list; user remove; token create; token list; token revoke; plan; doctor"
    )
    promised += (
        "; project add; project set; project list; project member add; project member remove; project member list"
    )
    promised += "; backup; restore; check; gc; audit; model add; model list; node key; node serve; node list"
    assert {tuple(words.split()) for words in promised.split(";")} == set(EVERY_COMMAND)


@pytest.mark.parametrize("path", EVERY_COMMAND, ids=" ".join)
def test_every_command_explains_itself_and_takes_the_settings(path: tuple[str, ...]) -> None:
    found = EVERY_COMMAND[path]
    assert found.get_short_help_str(200).endswith(".") or found.get_short_help_str(200).endswith("...")
    assert {"config", "state_dir"} <= {parameter.name for parameter in found.params}
    for parameter in found.params:
        if isinstance(parameter, click.Option) and parameter.name != "output":
            assert parameter.help, parameter.name


def test_users_and_tokens(command: Command) -> None:
    assert command("user", "add", "ada", "--role", "admin", "--project", "lab")[:2] == (0, "ada\n")
    code, secret, told = command("token", "create", "ada", "--expires", "12h")
    assert (code, secret.startswith("hzn_"), "cannot be shown again" in told) == (0, True, True)
    [user] = json.loads(command("user", "list", "-o", "json")[1])
    assert (user["name"], user["role"], user["project"]) == ("ada", "admin", "lab")
    assert (user["weight"], user["quotas"]) == ("1", "none")
    token_id = command("token", "list", "-o", "name")[1].strip()
    assert token_id in told
    assert command("token", "revoke", token_id) == (0, "", f"token {token_id} is revoked\n")
    [token] = yaml.safe_load(command("token", "list", "-o", "yaml")[1])
    assert token["revoked"].endswith("UTC")
    listed = command("token", "list")[1]
    assert listed.splitlines()[0].split() == [
        *("TOKEN_ID", "USER", "SCOPE", "LABEL", "CREATED", "CREATED_BY", "EXPIRES", "LAST_USED", "REVOKED"),
    ]
    assert secret.strip() not in listed


def test_a_token_has_a_scope_and_a_label(command: Command) -> None:
    command("user", "add", "prometheus")
    code, _, shown = command("token", "create", "prometheus", "--scope", "metrics", "--label", "scraper")
    assert (code, "scope metrics" in shown) == (0, True)
    [token] = json.loads(command("token", "list", "-o", "json")[1])
    assert (token["scope"], token["label"], token["last_used"]) == ("metrics", "scraper", "never")
    assert token["created_by"]
    assert command("token", "create", "prometheus", "--scope", "all")[0] == 2
    assert "at most 63 printable letters" in command("token", "create", "prometheus", "--label", "x" * 64)[2]


def test_members_of_a_project(command: Command) -> None:
    for user in ("ada", "bob"):
        command("user", "add", user, "--project", "lab")
    assert json.loads(command("project", "member", "list", "lab", "-o", "json")[1]) == []
    assert command("project", "member", "add", "lab", "ada", "--role", "admin") == (
        0,
        "",
        "user ada is admin of project lab\n",
    )
    assert command("project", "member", "add", "lab", "nobody")[0] == 4
    assert command("project", "member", "add", "lab", "bob")[0] == 0
    [lab] = json.loads(command("project", "list", "-o", "json")[1])
    assert (lab["users"], lab["members"]) == ("ada, bob", "ada (admin), bob (member)")
    ada, _ = json.loads(command("user", "list", "-o", "json")[1])
    assert ada["member_of"] == "lab (admin)"
    assert command("project", "member", "remove", "lab", "bob")[0] == 0
    assert command("project", "member", "remove", "lab", "bob")[0] == 4
    assert command("project", "member", "list", "-o", "name")[1] == "ada\n"


def test_a_typing_error_makes_no_project(command: Command) -> None:
    command("user", "add", "ada", "--project", "lab")
    for words in (("member", "add", "lba", "ada"), ("set", "lba", "--weight", "3")):
        code, _, told = command("project", *words)
        assert (code, "project lba does not exist (did you mean lab?)" in told) == (4, True), told
    assert command("project", "list", "-o", "name")[1].split() == ["lab"]
    assert command("project", "add", "physics", "--admin", "ada") == (0, "", "new project physics with ada as admin\n")
    assert (
        command("project", "add", "physics")[2] == "Error: project physics exists already; see: horizond project list\n"
    )
    assert command("project", "add", "x", "--admin", "nobody")[0] == 4
    assert command("project", "member", "list", "physics", "-o", "name")[1] == "ada\n"
    # With members in it, and nobody who is charged to it.
    assert command("project", "set", "physics", "--weight", "3") == (0, "", "project physics: weight 3, quotas none\n")
    assert "(user, new project y)" in command("user", "add", "bob", "--project", "y")[2]


def test_what_a_removed_user_leaves_is_said_before(command: Command, tmp_path: Path) -> None:
    command("user", "add", "eve")
    with sqlite3.connect(tmp_path / "state" / "horizon.db") as connection:
        connection.execute(
            "INSERT INTO datasets (dataset_id, owner, name, format, field_map, files, num_rows, digest, ready, "
            "created_s) VALUES ('dataset_1', 'eve', 'chats', 'messages', '{}', '[]', 1, 'd', 1, 0)"
        )
    connection.close()
    code, _, told = command("user", "remove", "eve")
    assert code == 2
    assert "user eve owns 0 jobs, 1 dataset and 0 models, which stay" in told
    assert "add --yes" in told, "nobody can be asked in a test"
    assert command("user", "list", "-o", "name")[1] == "eve\n"
    assert command("user", "remove", "eve", "--yes")[2].endswith("user eve is removed with 0 tokens\n")
    command("user", "add", "eve")
    command("token", "create", "eve", "--to", tmp_path / "token")
    assert command("user", "remove", "eve", "--yes")[2].endswith("user eve is removed with 1 token\n")


def test_a_token_goes_into_a_file_that_only_its_owner_can_read(command: Command, tmp_path: Path) -> None:
    command("user", "add", "ada")
    file = tmp_path / "ada.token"
    before = os.umask(0o022)
    try:
        code, out, told = command("token", "create", "ada", "--to", str(file))
    finally:
        os.umask(before)
    assert (code, out, f"it is in {file}" in told) == (0, "", True)
    assert (file.stat().st_mode & 0o777, file.read_text().startswith("hzn_")) == (0o600, True)
    assert "exists already" in command("token", "create", "ada", "--to", str(file))[2]
    other = tmp_path / "nobody.token"
    assert command("token", "create", "nobody", "--to", str(other))[0] == 4
    assert not other.exists()
    assert len(command("token", "list", "-o", "name")[1].split()) == 1


def test_a_user_is_disabled_and_gets_another_role(command: Command) -> None:
    command("user", "add", "ada")
    assert command("user", "set", "ada", "--disable", "--role", "viewer") == (
        0,
        "",
        "user ada has the role viewer\nuser ada is disabled\n",
    )
    [ada] = json.loads(command("user", "list", "-o", "json")[1])
    assert (ada["role"], bool(ada["disabled"])) == ("viewer", True)
    assert command("user", "set", "ada", "--enable", "--weight", "2")[0] == 0
    [ada] = json.loads(command("user", "list", "-o", "json")[1])
    assert (ada["weight"], ada["disabled"]) == ("2", "")
    assert command("user", "set", "ada")[0] == 2
    assert command("user", "set", "nobody", "--role", "admin")[0] == 4


def test_a_removed_user_leaves_no_allowance_and_no_membership_to_the_next_of_that_name(command: Command) -> None:
    command("user", "add", "ada")
    command("user", "set", "ada", "--weight", "5", "--max-queued-jobs", "1")
    command("user", "add", "lead")
    command("project", "member", "add", "lead", "ada")
    assert command("user", "remove", "ada", "--yes")[0] == 0
    command("user", "add", "ada", "--project", "lab")
    ada = next(user for user in json.loads(command("user", "list", "-o", "json")[1]) if user["name"] == "ada")
    assert (ada["weight"], ada["quotas"], ada["member_of"]) == ("1", "none", "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("user", "add", "a b"), 2, "user name 'a b' is not allowed: it must be 1 to 63 letters"),
        (("user", "add", "ada", "--role", "king"), 2, "'king' is not one of 'user', 'admin', 'viewer'"),
        (
            ("token", "create", "nobody"),
            4,
            "user nobody does not exist; create it first with: horizond user add nobody",
        ),
        (("token", "create", "ada", "--expires", "soon"), 2, "write a number with h, d, w or y such as 90d, or never"),
        (("token", "revoke", "tok_none"), 4, "token tok_none does not exist; see: horizond token list"),
        (("plan", "none.yaml"), 4, "none.yaml does not exist"),
        (("frobnicate",), 2, "'frobnicate' is not a command of "),
        (("usr", "list"), 2, "did you mean user?"),
        (("project", "ad", "lab"), 2, "did you mean add?"),
        (("user", "remove", "ada"), 4, "user ada does not exist"),
        (("project", "add", "a b"), 2, "project name 'a b' is not allowed"),
        (("serve", "--log-level", "loud"), 2, "'loud' is not one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_people_get_wrong(command: Command, arguments: tuple[str, ...], code: int, words: str) -> None:
    found, _, told = command(*arguments)
    assert (found, words in told) == (code, True), told


def test_a_name_that_is_taken(command: Command, tmp_path: Path) -> None:
    _, _, told = command("user", "add", "ada")
    assert told.endswith(f"next: horizond token create ada --state-dir {tmp_path / 'state'}\n")
    assert command("user", "add", "ada") == (2, "", "Error: user ada exists already\n")


def test_exit_codes() -> None:
    wanted: dict[type[HorizonError], int] = {Unauthenticated: 3, NotAllowed: 3, NotFound: 4, BadSetting: 2, DiskFull: 2}
    assert {kind: exit_code(kind("x")) for kind in wanted} == wanted


def test_lifetimes() -> None:
    assert parse_lifetime("never") is None
    assert [parse_lifetime(text) for text in ("1h", "2d", "1w", "1y")] == [3600, 172800, 604800, 31536000]
    for text in ("0d", "d", "-1d", "1.5h", "90"):
        with pytest.raises(BadSetting, match="is not a lifetime"):
            parse_lifetime(text)


SPEC = "name: job\nmodel: demo\ndataset: chats\ntrain: {max_steps: 2, learning_rate: 1e-3}\n"


def test_a_plan_adds_up(command: Command, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(SPEC)
    code, out, _ = command("plan", str(tmp_path / "job.yaml"), "--model-dir", str(model), "-o", "json")
    plan = json.loads(out)
    assert (code, plan["fits"], plan["num_parameters"]) == (0, True, 2_623_424)
    assert sum(plan["host_bytes"].values()) == plan["host_total_bytes"]
    shown = command("plan", str(tmp_path / "job.yaml"), "--model-dir", str(model))[1]
    assert "2,623,424" in shown
    assert "MiB" in shown


def test_a_plan_needs_no_weights(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, alone = write_demo_model(tmp_path / "model"), tmp_path / "alone"
    alone.mkdir()
    shutil.copy(model / "config.json", alone)
    (tmp_path / "job.yaml").write_text(SPEC)

    def planned(*arguments: str) -> dict[str, Any]:
        code, out, told = command("plan", str(tmp_path / "job.yaml"), *arguments, "-o", "json")
        assert code == 0, told
        plan: dict[str, Any] = json.loads(out)
        return {**plan, "model": ""}

    wanted = planned("--model-dir", str(model))
    assert planned("--model-dir", str(alone)) == wanted
    # Of the hub, the headers of the weights.
    (tmp_path / "job.yaml").write_text(SPEC.replace("demo", "lab/demo"))
    with used_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.add_folder("lab/demo", model)
        assert planned() == wanted
        assert hub.sent_bytes["model.safetensors"] <= 100_001
        hub.repositories.clear()
        code, _, told = command("plan", str(tmp_path / "job.yaml"))
        assert code == 4 and "the hub has no model lab/demo" in told


def test_a_plan_on_the_host_has_one_column_and_warns_of_a_warmup_without_end(command: Command, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(SPEC)
    code, out, _ = command("plan", str(tmp_path / "job.yaml"), "--model-dir", str(model))
    assert (code, "device_" in out or "device." in out) == (0, False)
    assert "train.warmup_steps is 10 and train.max_steps is 2" in out
    (tmp_path / "job.yaml").write_text(SPEC.replace("max_steps: 2", "max_steps: 2, warmup_steps: 1"))
    assert "warmup" not in command("plan", str(tmp_path / "job.yaml"), "--model-dir", str(model))[1]


def test_a_plan_says_on_how_many_nodes_a_range_may_start(command: Command, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(f"{SPEC}\nnodes: 1-3\n")
    arguments = ("plan", str(tmp_path / "job.yaml"), "--model-dir", str(model))
    plan = json.loads(command(*arguments, "-o", "json")[1])
    # As far as there are any: this machine has no fleet.
    wanted = {"least": 1, "most": 1, "host_bytes": plan["host_total_bytes"], "device_bytes": plan["device_total_bytes"]}
    assert (plan["num_nodes"], plan["lanes"], plan["node_range"]) == (1, 8, wanted)
    assert "1 to 1, " in command(*arguments)[1]


def test_the_doctor_ends_with_1_where_a_machine_cannot_train(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cannot(*_: object, **__: object) -> None:
        raise WorkerDied("the measurement was killed by SIGKILL")

    doctor = sys.modules["horizon_server.cli.doctor"]  # the package's attribute of that name is the command
    monkeypatch.setattr(doctor, "measure_rates", cannot)
    monkeypatch.setattr(doctor, "measure_bandwidth", lambda **_: None)
    (tmp_path / "horizond.toml").write_text(f"host_memory_reserve_bytes = {1 << 60}\n")
    code, out, _ = command("doctor", "--config", str(tmp_path / "horizond.toml"))
    lines = out.splitlines()
    assert code == 1
    assert lines[0].startswith("[fail]  host memory") and "give the daemon a higher limit" in lines[1]
    assert any(line.startswith("[warn]  largest model") for line in lines)
    assert any(line.startswith("[warn]  AdamW kernel   missing") for line in lines)
    assert any(" layers         " in line for line in lines)
    at = lines.index("[fail]  speed          not measured: the measurement was killed by SIGKILL")
    assert lines[at + 1].endswith("is the installation complete (pip install '.[server]')?")


def test_the_doctor_names_folders_on_one_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = sys.modules["horizon_server.cli.doctor"]
    monkeypatch.setattr(doctor, "measure", lambda folder: DriveSpeed(folder=str(folder), device=7))
    first, second = doctor._drives(load_settings(tier_dirs=("/nvme0", "/nvme1")))
    assert (first.verdict, second.verdict) == ("ok", "warn")
    assert "on the drive of /nvme0" in second.advice


def test_the_doctor_says_whether_layers_can_be_compiled_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor, gpu = sys.modules["horizon_server.cli.doctor"], Gpu(index=0, name="H100", memory_bytes=80 << 30)
    monkeypatch.setattr(doctor, "what_is_missing", lambda _: [])
    part = doctor._compiler((gpu,))
    assert part.found.endswith("the GPU") and part.facts["layers_compile_for"][-1] == "the GPU"
    monkeypatch.setattr(doctor, "what_is_missing", lambda _: ["CUDA's headers"])
    part = doctor._compiler((gpu,))
    assert part.verdict == "warn" and part.advice.endswith("which is slower; missing: CUDA's headers")
    assert "the GPU" not in part.facts["layers_compile_for"]


def test_a_plan_that_does_not_fit_ends_with_1(command: Command, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(SPEC)
    (tmp_path / "small.toml").write_text("host_memory_limit_bytes = 540000000\n")
    flags = ("--model-dir", str(model), "--config", str(tmp_path / "small.toml"))
    code, out, _ = command("plan", str(tmp_path / "job.yaml"), *flags)
    assert code == 1
    assert "MiB are available" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: [x\n", "job.yaml, line 2: not YAML: expected ',' or ']'"),
        (SPEC.replace("max_steps", "max_step"), "train.max_step is not a field of the job spec"),
        (SPEC.replace("1e-3", "-1"), "train.learning_rate is -1; it must be a number from 0 to 10"),
        ("- x\n", "the job spec must be a mapping"),
    ],
)
def test_a_plan_of_a_bad_spec(command: Command, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    code, _, told = command("plan", str(tmp_path / "job.yaml"))
    assert (code, words in told) == (2, True), told


def test_a_plan_names_the_folder_it_looks_in(command: Command, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    code, _, told = command("plan", str(tmp_path / "job.yaml"), "--model-dir", str(tmp_path))
    assert (code, "contains no config.json; name the model's folder with --model-dir" in told) == (4, True)


def test_a_plan_takes_the_job_file_that_the_client_takes(command: Command, tmp_path: Path) -> None:
    write_demo_model(tmp_path / "demo")
    text = SPEC.replace("demo", "./demo").replace("chats", "./chats.jsonl")
    (tmp_path / "job.yaml").write_text(text)
    code, out, told = command("plan", str(tmp_path / "job.yaml"), "-o", "json")
    assert (code, json.loads(out)["model"]) == (0, str(tmp_path / "demo")), told
    (tmp_path / "job.yaml").write_text(text.replace("./demo", "./none"))
    code, _, told = command("plan", str(tmp_path / "job.yaml"))
    assert (code, told) == (4, "Error: none contains no config.json; name the model's folder with --model-dir\n")


def test_the_doctor_measures_and_plans_predict_from_it(command: Command, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(SPEC)
    plan_of = ("plan", str(tmp_path / "job.yaml"), "--model-dir", str(model))
    _, out, told = command(*plan_of, "-o", "json")
    assert json.loads(out)["prediction"] is None
    assert "run 'horizond doctor' once" in told

    code, out, _ = command("doctor", "-o", "json")
    facts = json.loads(out)
    assert code == 0
    assert {check["verdict"] for check in facts["checks"]} <= {"ok", "warn"}
    found = {check["name"]: check["found"] for check in facts["checks"]}
    assert "times the STREAM triad of" in found["AdamW kernel"] or found["AdamW kernel"] == "missing"
    assert "GFLOP/s in products, copies" in found["speed"]
    assert ", writes " in found["disk"]
    assert all(bool(check["advice"]) == (check["verdict"] != "ok") for check in facts["checks"])
    assert facts["max_parameters"] > 0
    assert facts["host_memory_limit_bytes"] > 0
    assert facts["disk_free_bytes"] > 0
    assert facts["adamw_kernel"] and facts.get("compressed_of_exact_adamw_ratio", 1) > 0
    assert "the GPU" not in facts["layers_compile_for"]
    assert facts["num_cpus"] >= 1
    assert facts["host_peak_flops_per_s"] > 0
    assert facts["host_products_of_256_flops_per_s"] > 0
    for rate in ("elementwise_of_256_bytes", "h2d_bytes", "d2h_bytes", "adamw_bytes"):
        assert facts[f"host_{rate}_per_s"] > 0

    _, out, told = command(*plan_of, "-o", "json")
    prediction = json.loads(out)["prediction"]
    assert prediction["step_s"] > 0
    assert prediction["bound"] in ("compute", "h2d", "d2h", "host memory")
    assert "doctor" not in told
    assert "tokens/s" in command(*plan_of)[1]

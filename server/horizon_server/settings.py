"""The daemon's settings: flags, then environment (`HORIZOND_*`), then the TOML file, then defaults. The only reader of
the environment."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from horizon_server.errors import BadSetting, FieldViolation
from horizon_server.process_variables import CHILD_VARIABLES


def _split_list(value: object) -> object:
    """Accept `a,b` from the environment, and JSON as the other settings libraries write it."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError(f"{value!r:.60} is not a JSON list; write the values separated by commas") from None
    return [part.strip() for part in value.split(",") if part.strip()]


def _check_networks(networks: tuple[str, ...]) -> tuple[str, ...]:
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise ValueError(f"{error}; write networks such as 10.1.0.0/16 or fd00::/8") from None
    return networks


_BOX_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


def _check_boxes(boxes: tuple[str, ...]) -> tuple[str, ...]:
    names = [box.partition("=")[0] for box in boxes]
    for box, name in zip(boxes, names, strict=True):
        if not re.match(_BOX_NAME, name) or not re.match(r"^[^=]+:\d{1,5}$", box.partition("=")[2]):
            raise ValueError(f"{box!r:.80} is not NAME=HOST:PORT such as box2=10.0.0.2:7174")
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice; each box has a name of its own")
    return boxes


def _check_drives(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    for folder in folders:
        if not folder.is_absolute():
            raise ValueError(f"{folder} is not an absolute folder; write all of its path, such as /nvme0/horizon")
        if folders.count(folder) > 1:
            raise ValueError(f"{folder} is there twice; write one folder for each drive")
    return folders


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)]
Networks = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list), AfterValidator(_check_networks)]
Trackers = Annotated[
    tuple[Literal["tensorboard", "mlflow", "wandb", "trackio"], ...], NoDecode, BeforeValidator(_split_list)
]
Boxes = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list), AfterValidator(_check_boxes)]
Folders = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split_list)]
Drives = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split_list), AfterValidator(_check_drives)]


class Settings(BaseSettings):
    """Everything that can be set. Every field is a key of horizond.toml and an environment variable with the prefix
    HORIZOND_."""

    model_config = SettingsConfigDict(env_prefix="HORIZOND_", extra="forbid", frozen=True)

    state_dir: Path = Field(
        # Only root may write below /var.
        default_factory=lambda: (
            Path("/var/lib/horizond") if os.geteuid() == 0 else Path.home() / ".local/share/horizond"
        ),
        description="Folder with everything the daemon owns.",
    )
    grpc: str = Field("127.0.0.1:7171", description="HOST:PORT of the gRPC interface; port 0 picks a free one.")
    http: str = Field(
        "127.0.0.1:7172", description="HOST:PORT of REST, the web page and /metrics; port 0 picks a free one."
    )
    tls_cert: Path | None = Field(None, description="Server certificate (PEM). Off loopback one is made when unset.")
    tls_key: Path | None = Field(None, description="Key of the certificate (PEM).")
    tls_names: Names = Field(
        (),
        description="Host names and addresses that clients connect to, for the certificate that the daemon makes.",
    )
    tls_client_ca: Path | None = Field(
        None,
        description="Authority of client certificates (PEM). When set, gRPC and HTTP serve only clients with a "
        "certificate that it has signed; a token is needed too.",
    )
    max_calls_per_s: float = Field(
        100.0, gt=0, description="Average calls per second per user; further calls wait or are refused."
    )
    audit_days: float = Field(365.0, gt=0, description="Days that entries of the audit log are kept.")
    metrics_token_required: bool = Field(
        False,
        description="Require a token on /metrics too. Off loopback it is always required; without one the series of "
        "jobs, users and projects are left out.",
    )
    max_token_days: float = Field(
        365.0,
        gt=0,
        le=3650,
        description="Longest life of a token that a user creates with horizon token create; horizond token create has "
        "no such limit.",
    )
    model_roots: Folders = Field((), description="Folders on the node below which a job may name a model folder.")
    tier_dirs: Drives = Field(
        (),
        description="Folders on local drives, one for each drive, for the states of jobs with memory.tier: drive "
        "(docs/drives.md). Their file systems must allow O_DIRECT, as ext4 and XFS do.",
    )
    tier_endurance_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes that all drives of tier_dirs together may be written in their life, from their data sheets "
        "(TBW). A job that writes more than 5 % of it must say memory.accept_wear: true; without this setting, every "
        "job on drives must.",
    )
    host_memory_limit_bytes: int | None = Field(
        None, ge=1, description="Upper bound for jobs; default: the machine's or control group's limit."
    )
    host_memory_reserve_bytes: int = Field(
        512 * 2**20, ge=0, description="Host memory kept free for the daemon and the system."
    )
    device_arena_bytes: int | None = Field(
        None, ge=1, description="Bound of the device arena when the device is the host."
    )
    num_threads: int | None = Field(
        None, ge=1, description="Threads of a worker; default: all processors of the daemon's affinity mask."
    )
    host_devices: int = Field(
        1,
        ge=1,
        le=64,
        description="What the processors are divided into, as devices that jobs take turns on: with 2, jobs on the "
        "host compute on half of the processors each, or on all with gpus: 2. For machines with several sockets, and "
        "for trying out jobs on several devices.",
    )
    gpu: str | None = Field(
        None,
        min_length=1,
        description="Index (as nvidia-smi lists it) or UUID of the only GPU for jobs with device: cuda; default: all "
        "that torch finds.",
    )
    numa_interleave: bool = Field(
        True,
        description="Spread a worker's memory over all NUMA nodes; where its GPUs are next to all of them, put what "
        "each GPU's process owns next to it. A policy that the daemon was started with (numactl) "
        "is kept.",
    )
    trace_workers: bool = Field(
        False,
        description="Write trace.json into a job's attempt folder: what ran when in its last steps, for Perfetto.",
    )
    upload_expiry_s: float = Field(7 * 86400.0, gt=0, description="Partial uploads older than this are removed.")
    trash_days: float = Field(
        7.0, ge=0, description="Days that unreferenced files stay in the state folder's trash/ before they are deleted."
    )
    cache_days: float = Field(
        30.0, gt=0, description="Days to keep prepared data and compiled layers that no job uses."
    )
    max_log_bytes: int = Field(
        64 * 2**20,
        ge=2**20,
        description="Maximum size of an attempt's log; a longer log keeps its beginning and its end.",
    )
    deletion_notice_days: float = Field(
        7.0, ge=0, description="Days between the warning to a job's owner and the deletion of its checkpoints."
    )
    min_free_bytes: int | None = Field(
        None,
        ge=0,
        description="Bytes of the disk that uploads, preparations and checkpoints leave free; default: 1 % of it, at "
        "most 2 GiB.",
    )
    max_dataset_bytes: int = Field(64 * 2**30, ge=1, description="Largest dataset that may be announced.")
    max_model_bytes: int = Field(2 * 2**40, ge=1, description="Largest model folder that may be announced.")
    drain_timeout_s: float = Field(
        120.0, gt=0, description="How long SIGTERM waits for the checkpoints of all resident jobs."
    )
    on_sigterm: Literal["auto", "leave", "drain"] = Field(
        "auto",
        description="What SIGTERM does to running jobs. leave: their workers train on, and the next daemon takes them "
        "over; drain: they are checkpointed and end; auto: drain where the daemon is process 1, as in containers, else "
        "leave. SIGINT (Ctrl-C) always drains.",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        le=1000,
        description="Maximum automatic restarts in a row after transient failures, without a completed step in "
        "between.",
    )
    time_slice_s: float = Field(
        60.0,
        gt=0,
        description="How long a job has a device before another one that waits may have it, to the next step's end.",
    )
    turn_grace_s: float = Field(
        30.0,
        gt=0,
        description="Grace period beyond one step for a worker to return its device; then a warning, and after another "
        "one it is killed.",
    )
    silence_limit_s: float = Field(
        600.0,
        ge=0,
        description="A worker that makes no progress for longer, and for longer than 20 of its steps, is killed, and "
        "its job is restarted; 0 never does that.",
    )
    share_half_life_s: float = Field(
        86400.0,
        gt=0,
        description="Half-life of a user's device use in the fair-share order.",
    )
    max_loading_jobs: int = Field(
        4,
        ge=1,
        description="Jobs that are loaded at the same time, in the order of shares; the next one begins when one has "
        "asked for its first turn on its device.",
    )
    max_loading_jobs_of_user: int = Field(
        2,
        ge=1,
        description="Jobs of one user that are loaded at the same time, so that many jobs of one user do not take the "
        "processors of those that train; 1 while jobs of others train.",
    )
    max_resident_jobs: int = Field(
        4,
        ge=1,
        description="Jobs of one user in memory, unless an admin has set another number for the user: horizond user "
        "set --max-resident-jobs.",
    )
    max_residence_s: float = Field(
        4 * 3600.0,
        gt=0,
        description="A job that has been in memory for longer may have to make room for one that waits.",
    )
    keep_devices_s: float = Field(
        300.0,
        ge=0,
        description="How long a job with a range of gpus keeps the devices that it has, before it gives some back that "
        "others need, or takes more that are free: each change costs it a restart of its processes.",
    )
    max_wait_s: float = Field(
        86400.0,
        gt=0,
        description="A user whose jobs have waited longer than this gets the next free memory.",
    )
    sampling_keep_s: float = Field(
        60.0,
        ge=0,
        description="How long the model of horizon checkpoint sample and chat stays in memory after an answer, for the "
        "next one, unless a job needs the memory; 0 never keeps it.",
    )
    compile_pushed_models: int = Field(
        3,
        ge=0,
        le=100,
        description="Of how many models, those that were pushed last, the layers are compiled while the node is idle, "
        "so that their first job need not wait for it; 0 compiles only for jobs that are submitted.",
    )
    spare_worker: bool = Field(
        True,
        description="Keep a worker process that has loaded its libraries, so that the next job starts seconds earlier. "
        "It takes up to 512 MiB of host memory that no job has, and is ended for a job that needs it.",
    )
    public_url: str | None = Field(
        None,
        pattern=r"^https?://[^/?#\s]+(/[^?#\s]*)?$",
        description="Where users open the web page, such as https://gpubox.lab.edu:7172: webhooks then have a link to "
        "the job, and the boards link there.",
    )
    webhook_networks: Networks = Field(
        (),
        description="Networks that webhooks may be sent to besides the public internet, such as 10.1.0.0/16 for a chat "
        "server of the lab. Loopback, private and link-local addresses are refused unless they are in one of these.",
    )
    trackers: Trackers = Field(
        ("tensorboard",),
        description="Trackers that report_to of a job file may name on this node: tensorboard, mlflow, wandb, trackio. "
        "Each needs its package: pip install 'horizon-train[mlflow]'.",
    )
    tracker_dir: Path | None = Field(
        None,
        description="Folder for what trackers write on this node, such as TensorBoard's runs/; default: trackers/ in "
        "the state folder, which only the daemon's user can read.",
    )
    mlflow_tracking_uri: str | None = Field(
        None, description="Where report_to: mlflow writes, such as http://mlflow.lab.edu:5000."
    )
    tracker_keys_dir: Path | None = Field(
        None,
        description="Folder with keys for trackers in files that only the daemon's user can read: user-NAME.env, "
        "project-NAME.env, everybody.env, with lines such as WANDB_API_KEY=...",
    )
    fleet_address: str | None = Field(
        None,
        description="This machine's address on a private network. horizond node serve listens there, and so does a "
        "daemon with box_port; ranks of other nodes meet there. What ranks say to each other is not encrypted.",
    )
    fleet_port: int = Field(7173, ge=0, le=65535, description="Port of horizond node serve; 0 picks a free one.")
    fleet_key_file: Path | None = Field(
        None,
        description="Key of the fleet, made by horizond node key and copied to each of its machines. Who has it may do "
        "all that a node may, and act as any user where there is a box_port.",
    )
    fleet_network_gbps: float | None = Field(
        None,
        gt=0,
        description="Speed of the private network in Gbit/s, for predictions; default: what the kernel says of the "
        "interface with fleet_address. Where it says nothing, copies to boxes are taken to cross 1 Gbit/s.",
    )
    nodes: Names = Field(
        (),
        description="HOST:PORT of further nodes, which run horizond node serve: jobs with nodes use them, in this "
        "order.",
    )
    box_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port at fleet_address where the daemon of another machine may send jobs to this one; 0 picks a "
        "free one. Default: none may.",
    )
    box_name: str = Field(
        default_factory=socket.gethostname,
        pattern=_BOX_NAME,
        description="What this machine is called in a job's node: NAME. Default: its host name.",
    )
    boxes: Boxes = Field(
        (),
        description="NAME=HOST:PORT of machines with daemons of their own (their fleet_address and box_port): a job "
        "is sent to one of them where it is predicted to end there first.",
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error.")
    log_json: bool = Field(False, description="One JSON object per line instead of text.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and file arrive as keywords (flags already on top); `load_settings` lets the environment override the
        file."""
        return (init_settings, env_settings)

    def arena_limit(self, host_limit_bytes: int) -> int:
        """Bound of the device arena in bytes where the device is the host: as set, or half of the host's memory."""
        return self.device_arena_bytes or host_limit_bytes // 2

    @property
    def leaves_workers(self) -> bool:
        """Whether SIGTERM leaves workers running."""
        # With process 1 the kernel ends every other process of the container.
        return self.on_sigterm == "leave" or (self.on_sigterm == "auto" and os.getpid() != 1)

    @property
    def database_path(self) -> Path:
        """The SQLite file."""
        return self.state_dir / "horizon.db"


_UNKNOWN_KEY = f"there is no such setting; known: {', '.join(sorted(Settings.model_fields))}"


def load_settings(config: Path | None = None, **flags: Any) -> Settings:
    """Return the settings: `flags` that are not None, then the environment, then the TOML file, then defaults.

    Raises:
        BadSetting: naming the file and the key that is unknown or wrong.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        document = {} if config is None else tomllib.loads(config.read_text("utf-8"))
    except FileNotFoundError as error:
        raise BadSetting(f"{config} does not exist; give an existing file to --config, or leave it out") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise BadSetting(f"{config} cannot be read as TOML: {error}") from error
    for name, value in document.items():
        if f"HORIZOND_{name.upper()}" not in os.environ:
            given.setdefault(name, value)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        violations = [
            FieldViolation(
                field=".".join(map(str, e["loc"])),
                description=f"setting {'.'.join(map(str, e['loc']))}: "
                + (_UNKNOWN_KEY if e["type"] == "extra_forbidden" else e["msg"].removeprefix("Value error, ")),
            )
            for e in error.errors()
        ]
        where = f" (from {config}, HORIZOND_{violations[0].field.upper()} or its flag)" if config else ""
        raise BadSetting(f"{violations[0].description}{where}", violations=violations) from error
    if (settings.tls_cert is None) != (settings.tls_key is None):
        missing = "tls_key" if settings.tls_key is None else "tls_cert"
        raise BadSetting(f"setting {missing}: a certificate and its key belong together; give both, or neither")
    if settings.nodes and not (settings.fleet_address and settings.fleet_key_file):
        missing = "fleet_key_file" if settings.fleet_address else "fleet_address"
        raise BadSetting(f"setting {missing}: nodes need it (docs/nodes.md)")
    if settings.boxes and not settings.fleet_key_file:
        raise BadSetting("setting fleet_key_file: boxes need it (docs/fleet.md)")
    if settings.box_port is not None and not (settings.fleet_address and settings.fleet_key_file):
        missing = "fleet_key_file" if settings.fleet_address else "fleet_address"
        raise BadSetting(f"setting {missing}: box_port needs it (docs/fleet.md)")
    if settings.box_name in [box.partition("=")[0] for box in settings.boxes]:
        raise BadSetting(f"setting boxes: {settings.box_name} is the name of this machine (setting box_name)")
    if "mlflow" in settings.trackers and not settings.mlflow_tracking_uri:
        raise BadSetting("setting mlflow_tracking_uri: trackers has mlflow, which needs to know where to write")
    return settings


def watchdog_limit_s() -> float:
    """Return how long systemd waits for a sign of life of this process, before it restarts it; 0 where it does not."""
    # As sd_watchdog_enabled(3): another process may have inherited the variables.
    text, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
    return int(text) / 1e6 if text.isdecimal() and pid == str(os.getpid()) else 0.0


def quiet_libraries() -> None:
    """Keep gRPC's own lines from stderr, for processes that serve; to be called before gRPC is imported."""
    # It writes one for each TLS handshake that fails and past the daemon's log with its limits: a caller without a
    # token could fill the disk. GRPC_VERBOSITY in the environment shows them again.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def child_environment() -> dict[str, str]:
    """Return the environment of child processes: the daemon's own, without the daemon's settings, and with hubs
    switched off."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HORIZOND_")}
    return kept | CHILD_VARIABLES

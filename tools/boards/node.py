"""The Node board: memory, disk and GPUs of the machine, the work of its devices, and the daemon itself."""

from __future__ import annotations

from boards.chart import (
    DAEMON,
    DAEMON_STARTED,
    NODE_CLOSED,
    NODE_VARIABLE,
    PAGE_VARIABLE,
    Board,
    Chart,
    named,
    quantile,
    rate,
    select,
)

_OWN = 'component!="base"'
_LIMIT = select("horizon_host_memory_limit_bytes")
_FREE = select("horizon_host_memory_available_bytes")
_DISK_FREE = select("horizon_disk_free_bytes")
_DISK = select("horizon_disk_total_bytes")
_FAULTY = 'code=~"5.."'
_ERRORS = 'grpc_code=~"INTERNAL|UNKNOWN|DATA_LOSS"'

_NOW = (
    Chart(
        title="Daemon",
        text="Whether Prometheus reaches it.",
        good="Up.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        words={"1": "up", "0": "down"},
        maximum=1,
        warn=0.9,
        bad=0.5,
        queries=[(select("up", DAEMON), "{{instance}}")],
    ),
    Chart(
        title="Version",
        text="What runs.",
        good="The version that you installed last.",
        unit="short",
        width=4,
        height=4,
        kind="name",
        queries=[(select("horizon_build_info"), "{{version}}")],
    ),
    Chart(
        title="Up since",
        text="Time since the daemon started.",
        good="Since the last upgrade.",
        unit="s",
        width=4,
        height=4,
        kind="number",
        queries=[(f"time() - {select('process_start_time_seconds', DAEMON)}", "{{instance}}")],
    ),
    Chart(
        title="Memory free",
        text="Host memory that is free for jobs, of the limit of the machine or the control group.",
        good="Above the reserve (host_memory_reserve_bytes), also with all jobs loaded.",
        unit="percentunit",
        width=4,
        height=4,
        kind="number",
        maximum=1,
        warn=0.05,
        bad=0.02,
        queries=[(f"{_FREE} / {_LIMIT}", "{{instance}}")],
    ),
    Chart(
        title="Disk free",
        text="Of the disk of the state folder.",
        good="More than 10 %.",
        unit="percentunit",
        width=4,
        height=4,
        kind="number",
        maximum=1,
        warn=0.1,
        bad=0.05,
        queries=[(f"{_DISK_FREE} / {_DISK}", "{{instance}}")],
    ),
    Chart(
        title="Node open",
        text="Whether jobs may start: closed in a maintenance window, or while an admin has cordoned or drained it.",
        good="Open, but for maintenance.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        words={"1": "open", "0": "closed"},
        maximum=1,
        queries=[(select("horizon_node_open"), "{{instance}}")],
    ),
    Chart(
        title="Further nodes",
        text="Nodes that jobs with `nodes` use besides this one: free, busy for a job, or lost, which do not answer.",
        good="None is lost.",
        unit="short",
        width=8,
        height=4,
        kind="number",
        queries=[(f"sum by (instance, state) ({select('horizon_fleet_nodes')})", "{{state}}")],
    ),
    Chart(
        title="Machines of the fleet",
        text="Machines with daemons of their own, which jobs are sent to: open, closed by an admin, or lost.",
        good="None is lost.",
        unit="short",
        width=8,
        height=4,
        kind="number",
        queries=[(f"sum by (instance, state) ({select('horizon_fleet_boxes')})", "{{state}}")],
    ),
)

_MEMORY = (
    Chart(
        title="Host memory by job",
        text="What each resident job uses.",
        good="Each stays below its plan: its own board shows both.",
        unit="bytes",
        kind="stacked",
        width=12,
        of_jobs=True,
        queries=[
            (
                f"sum by (instance, job_id, name, owner) ({named('horizon_host_memory_bytes')})",
                "{{name}} ({{owner}})",
            )
        ],
    ),
    Chart(
        title="Host memory against its limit",
        text="The limit is that of the machine or of the control group, whichever is lower; promised is the sum of the "
        "plans of all resident jobs, with each base of adapters once, whatever number of jobs is on it.",
        good="In use <= promised <= limit - reserve.",
        unit="bytes",
        width=12,
        queries=[
            (f"sum by (instance) ({select('horizon_host_memory_bytes', _OWN)})", "in use by jobs, without bases"),
            (f"sum by (instance) ({select('horizon_host_memory_planned_bytes', _OWN)})", "planned, without bases"),
            (select("horizon_shared_base_bytes"), "bases, each once"),
            (select("horizon_host_memory_promised_bytes"), "promised"),
            (_LIMIT, "limit"),
            (_FREE, "available"),
        ],
    ),
    Chart(
        title="Device memory by job",
        text="Peak of each job's last step, against its plan.",
        good="In use <= planned.",
        unit="bytes",
        queries=[
            (f"sum by (instance, device, job_id) ({select('horizon_device_memory_bytes')})", "{{job_id}} in use"),
            (
                f"sum by (instance, device, job_id) ({select('horizon_device_memory_planned_bytes')})",
                "{{job_id}} planned",
            ),
        ],
    ),
    Chart(
        title="Disk of the state folder",
        text="Checkpoints, datasets, models and the database.",
        good="More than 10 % free, and no steady fall: the Lab board shows who stores how much.",
        unit="bytes",
        queries=[(_DISK_FREE, "free"), (_DISK, "total")],
    ),
    Chart(
        title="Time to write a checkpoint",
        text="p95 over the last hour.",
        good="Size of the checkpoint divided by what the disk writes; steady.",
        unit="s",
        queries=[(quantile(0.95, "horizon_checkpoint_duration_seconds", window="1h"), "p95")],
    ),
)

_GPUS = (
    Chart(
        title="GPU utilisation",
        text="Share of the last moment in which a kernel ran, by any process.",
        good="Near 100 % while a job has its turn. The driver counts a kernel that uses little of the GPU as well.",
        unit="percentunit",
        maximum=1,
        queries=[
            (
                f"{select('horizon_gpu_utilization_ratio')} * on (instance, device) group_left (name) "
                f"{select('horizon_gpu_info')}",
                "{{device}} {{name}}",
            )
        ],
    ),
    Chart(
        title="GPU memory",
        text="In use by all processes, against what there is.",
        good="Below the total by the working space of a step.",
        unit="bytes",
        queries=[
            (select("horizon_gpu_memory_used_bytes"), "{{device}} in use"),
            (select("horizon_gpu_memory_total_bytes"), "{{device}} total"),
        ],
    ),
    Chart(
        title="GPU temperature",
        text="Against the temperature at which it slows itself down.",
        good="At least 5 degrees below the limit.",
        unit="celsius",
        queries=[
            (select("horizon_gpu_temperature_celsius"), "{{device}}"),
            (select("horizon_gpu_temperature_limit_celsius"), "{{device}} limit"),
        ],
    ),
    Chart(
        title="GPU power",
        text="Drawn, against what it may draw.",
        good="Near the limit while it computes; at the limit all the time is normal.",
        unit="watt",
        queries=[
            (select("horizon_gpu_power_watts"), "{{device}}"),
            (select("horizon_gpu_power_limit_watts"), "{{device}} limit"),
        ],
    ),
    Chart(
        title="PCIe traffic",
        text="Between host and GPU, by all processes, in samples of 20 ms.",
        good="h2d at what 'horizond doctor' measured while layers are streamed.",
        unit="Bps",
        queries=[(select("horizon_gpu_pcie_bytes_per_second"), "{{device}} {{direction}}")],
    ),
    Chart(
        title="PCIe lanes",
        text="In use, and what GPU and slot could use.",
        good="Both the same: usually 16. Fewer lanes make every step slower.",
        unit="short",
        queries=[
            (select("horizon_gpu_pcie_link_width"), "{{device}} in use"),
            (select("horizon_gpu_pcie_link_max_width"), "{{device}} possible"),
        ],
    ),
    Chart(
        title="GPU clock",
        text="Clock of the multiprocessors.",
        good="Near its maximum while it computes, unless power is at its limit.",
        unit="hertz",
        queries=[(select("horizon_gpu_sm_clock_hertz"), "{{device}}")],
    ),
    Chart(
        title="GPU troubles",
        text="Whether the driver answers, whether heat or the power supply slows it down, and errors of its memory "
        "that ECC could not correct.",
        good="Answers is 1, the others are 0.",
        unit="short",
        width=16,
        queries=[
            (select("horizon_gpu_up"), "{{device}} answers"),
            (select("horizon_gpu_slowed"), "{{device}} slowed down"),
            (select("horizon_gpu_memory_errors"), "{{device}} memory errors"),
        ],
    ),
)

_WORK = (
    Chart(
        title="Link throughput",
        text="Bytes that jobs move between host and device.",
        good="Near the link's measured rate where a job is bound by transfers.",
        unit="Bps",
        queries=[(rate("horizon_transfer_bytes_total", "device, direction"), "{{device}} {{direction}}")],
    ),
    Chart(
        title="Link busy and exposed",
        text="Share of the time the link worked, and share of the time compute stood idle for it.",
        good="Exposed near 0.",
        unit="percentunit",
        queries=[
            (rate("horizon_transfer_seconds_total", "device, direction"), "{{device}} {{direction}} busy"),
            (rate("horizon_transfer_exposed_seconds_total", "device, direction"), "{{device}} {{direction}} exposed"),
        ],
    ),
    Chart(
        title="Compute",
        text="Share of the time the compute queue worked, and the part of it in which the host was still launching.",
        good="Busy near 100 % of a turn; launching far below busy.",
        unit="percentunit",
        queries=[
            (rate("horizon_compute_seconds_total", "device"), "{{device}} busy"),
            (rate("horizon_compute_launching_seconds_total", "device"), "{{device}} busy while the host launches"),
        ],
    ),
    Chart(
        title="Optimizer",
        text="Share of the time the optimizer worked, and of that what nothing hid.",
        good="Exposed is a small part of busy. On the host device nothing hides it.",
        unit="percentunit",
        width=12,
        queries=[
            (rate("horizon_optimizer_seconds_total"), "busy"),
            (rate("horizon_optimizer_exposed_seconds_total"), "exposed"),
        ],
    ),
    Chart(
        title="Drives",
        text="Bytes of states that jobs read from drives and write to them.",
        good="Nothing where no job asks for it; near what horizond doctor measures where a job is bound by drives.",
        unit="Bps",
        width=12,
        queries=[
            (rate("horizon_drive_read_bytes_total", "drive"), "{{drive}} read"),
            (rate("horizon_drive_written_bytes_total", "drive"), "{{drive}} written"),
        ],
    ),
    Chart(
        title="Step duration",
        text="Optimizer steps of all jobs.",
        good="Steady while the same jobs run; p95 near p50 where only one does.",
        unit="s",
        width=12,
        queries=[
            (quantile(0.5, "horizon_step_duration_seconds"), "p50"),
            (quantile(0.95, "horizon_step_duration_seconds"), "p95"),
        ],
    ),
)

_DAEMON = (
    Chart(
        title="gRPC calls",
        text="Finished calls by method and status.",
        good="OK. Some NOT_FOUND and INVALID_ARGUMENT are users' mistakes.",
        unit="reqps",
        queries=[
            (
                rate("grpc_server_handled_total", "grpc_service, grpc_method, grpc_code", DAEMON),
                "{{grpc_method}} {{grpc_code}}",
            )
        ],
    ),
    Chart(
        title="gRPC latency",
        text="p95; streams count until they end.",
        good="Below 100 ms, but for WatchJob and uploads.",
        unit="s",
        queries=[(select("instance_grpc_method:grpc_server_handling_seconds:p95_5m"), "{{grpc_method}}")],
    ),
    Chart(
        title="Defects",
        text="Calls that ended as INTERNAL, UNKNOWN or DATA_LOSS, and requests answered with 5xx, per second.",
        good="0: each is a defect of the daemon or a full disk. Its log says more.",
        unit="reqps",
        bad=0.001,
        queries=[
            (f"{rate('grpc_server_handled_total', '', DAEMON, _ERRORS)} or vector(0)", "gRPC"),
            (f"{rate('http_request_duration_seconds_count', '', DAEMON, _FAULTY)} or vector(0)", "HTTP"),
        ],
    ),
    Chart(
        title="HTTP requests",
        text="Finished requests by route and code.",
        good="200 and 304.",
        unit="reqps",
        queries=[(rate("http_request_duration_seconds_count", "route, code", DAEMON), "{{route}} {{code}}")],
    ),
    Chart(
        title="Webhooks",
        text="Attempts to deliver webhooks by outcome; retried ones are sent again.",
        good="delivered; 'horizon webhook deliveries' shows why others fail.",
        unit="ops",
        queries=[(rate("horizon_webhook_deliveries_total", "outcome", DAEMON), "{{outcome}}")],
    ),
    Chart(
        title="HTTP latency",
        text="p95; event streams count until they end.",
        good="Below 100 ms, but for event streams.",
        unit="s",
        queries=[(select("instance_route:http_request_duration_seconds:p95_5m"), "{{route}}")],
    ),
    Chart(
        title="Scrape",
        text="How long Prometheus waits for /metrics, and how many series it gets.",
        good="Below 0.1 s. The number of series grows with users and resident jobs, not with ended jobs.",
        unit="s",
        queries=[(select("scrape_duration_seconds", DAEMON), "{{instance}}")],
    ),
    Chart(
        title="Processor time of the daemon",
        text="Of one processor, without workers.",
        good="A few percent; more than half of one makes every call slow.",
        unit="percentunit",
        queries=[(f"rate({select('process_cpu_seconds_total', DAEMON)}[$__rate_interval])", "{{instance}}")],
    ),
    Chart(
        title="Memory of the daemon",
        text="Resident memory of the daemon's process, without workers.",
        good="A few hundred MiB, flat over days.",
        unit="bytes",
        queries=[(select("process_resident_memory_bytes", DAEMON), "{{instance}}")],
    ),
    Chart(
        title="Open files of the daemon",
        text="Of what the system allows it.",
        good="Far below 100 %; it grows with clients that watch.",
        unit="percentunit",
        maximum=1,
        queries=[
            (
                f"{select('process_open_fds', DAEMON)} / {select('process_max_fds', DAEMON)}",
                "{{instance}}",
            )
        ],
    ),
    Chart(
        title="Certificate",
        text="Time until the TLS certificate ends; no data without TLS.",
        good="More than 30 days.",
        unit="s",
        width=24,
        height=5,
        minimum=None,
        queries=[(f"({select('horizon_tls_certificate_expiry_timestamp_seconds')} > 0) - time()", "ends in")],
    ),
)

# Of the compose profiles node and gpu: their instances are not the daemon's, so all of them are shown.
_EXPORTERS = (
    Chart(
        title="Processors",
        text="Share of all processors in use. From node_exporter.",
        good="Near 100 % while jobs train on the host; far below while a GPU does.",
        unit="percentunit",
        maximum=1,
        queries=[
            (
                'avg by (instance) (1 - rate(node_cpu_seconds_total{job="node", mode="idle"}[$__rate_interval]))',
                "{{instance}}",
            )
        ],
    ),
    Chart(
        title="Disk traffic",
        text="Read and written, by disk. From node_exporter.",
        good="Peaks at loading and checkpoints; near 0 between them.",
        unit="Bps",
        queries=[
            ('rate(node_disk_read_bytes_total{job="node"}[$__rate_interval])', "{{device}} read"),
            ('rate(node_disk_written_bytes_total{job="node"}[$__rate_interval])', "{{device}} written"),
        ],
    ),
    Chart(
        title="Pressure on memory",
        text="Share of the time in which all processes waited for memory. From node_exporter.",
        good="0. Above: the machine swaps or reclaims, and steps take far longer.",
        unit="percentunit",
        queries=[('rate(node_pressure_memory_stalled_seconds_total{job="node"}[$__rate_interval])', "{{instance}}")],
    ),
    Chart(
        title="Tensor cores",
        text="Share of cycles in which they worked. From dcgm-exporter.",
        good="What docs/performance.md says of the size of the model.",
        unit="percentunit",
        width=12,
        maximum=1,
        queries=[('DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{job="gpu"}', "GPU {{gpu}}")],
    ),
    Chart(
        title="Xid errors",
        text="Number of the last error that the driver logged of the GPU. From dcgm-exporter.",
        good="0. NVIDIA's list of Xid errors says what a number means.",
        unit="short",
        width=12,
        queries=[('DCGM_FI_DEV_XID_ERRORS{job="gpu"}', "GPU {{gpu}}")],
    ),
)

_RANKS = (
    Chart(
        title="Devices of a job",
        text="Devices that compute the steps of a resident job together.",
        good="What its file asks for; of a range, more while others wait for none.",
        unit="short",
        width=6,
        queries=[(select("horizon_job_ranks"), "{{job_id}}")],
        of_jobs=True,
    ),
    Chart(
        title="Waiting for other devices",
        text="Share of the time that each device of a job stood idle for exchanges with the others, or for their work.",
        good="About equal for all of a job. The one that waits least is the one that the others wait for.",
        unit="percentunit",
        width=6,
        queries=[(rate("horizon_rank_wait_seconds_total", "job_id, rank"), "{{job_id}} rank {{rank}}")],
        of_jobs=True,
    ),
    Chart(
        title="Between devices",
        text="Bytes that a device gets from the others of its job, by what they are.",
        good="Weights and gradients near what horizond doctor measured between devices; numbers next to nothing.",
        unit="Bps",
        width=6,
        queries=[(rate("horizon_collective_bytes_total", "device, kind"), "{{device}} {{kind}}")],
    ),
    Chart(
        title="Exchanges busy and exposed",
        text="Share of the time that a device was in exchanges, and share of it that compute stood idle for them.",
        good="Exposed near 0.",
        unit="percentunit",
        width=6,
        queries=[
            (rate("horizon_collective_seconds_total", "device, kind"), "{{device}} {{kind}} busy"),
            (rate("horizon_collective_exposed_seconds_total", "device, kind"), "{{device}} {{kind}} exposed"),
        ],
    ),
)

NODE = Board(
    uid="horizon-node",
    title="horizon / Node",
    text="Memory, disk and GPUs of the machine, the work of its devices, and the daemon itself.",
    variables=(NODE_VARIABLE, PAGE_VARIABLE),
    rows=(
        ("Now", _NOW),
        ("Memory and disk", _MEMORY),
        ("GPUs", _GPUS),
        ("Transfer and compute", _WORK),
        ("Jobs of several devices", _RANKS),
        ("Daemon", _DAEMON),
        ("From node_exporter and dcgm-exporter", _EXPORTERS),
    ),
    marks=(DAEMON_STARTED, NODE_CLOSED),
    links={"Web page": "${page}/"},
)

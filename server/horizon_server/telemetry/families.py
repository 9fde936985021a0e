"""The metrics of the daemon that no record declares at a field: names, what they mean, labels and buckets."""

from __future__ import annotations

from horizon_server.figures import Metric

OVERLAP_WINDOW_STEPS = 20
"""The overlap ratio is taken over a job's last steps, at most this number."""
NEWEST_ENDED = 20
"""Jobs that ended keep one series, so that a board can list them: at most this number, however many there were."""

_WAIT_BUCKETS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 3 * 86400.0)
# A turn lasts a time slice, or one step where a job leaves the device idle; the ageing bound is ten slices for each job
# that shares it.
_TURN_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 1800.0, 3600.0)
_HANDOVER_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_CALL_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 120.0)
FAMILIES = (
    Metric("horizon_build_info", "1; the label says which version runs.", ("version",)),
    Metric("horizon_jobs", "Jobs by state.", ("state",)),
    Metric("horizon_job_transitions_total", "Changes of a job's state.", ("to", "reason")),
    Metric("horizon_job_queue_wait_seconds", "Time from queued to the start of an attempt.", buckets=_WAIT_BUCKETS_S),
    Metric("horizon_worker_restarts_total", "Workers that were started again for a job.", ("reason",)),
    Metric(
        "horizon_job_info",
        "1; the labels say what the job_id of the other series stands for.",
        ("job_id", "name", "owner", "project", "model", "dataset"),
    ),
    Metric(
        "horizon_job_loading_since_timestamp_seconds",
        "Unix time since which a job is in this state before its first turn on the device.",
        ("job_id", "state"),
    ),
    Metric(
        "horizon_job_attempt_start_timestamp_seconds",
        "Unix time when the job's present attempt began; the first one has the number 1.",
        ("job_id", "attempt"),
    ),
    Metric(
        "horizon_job_last_step_timestamp_seconds",
        "Unix time of the job's last finished step; before the first one, when it began to run.",
        ("job_id",),
    ),
    Metric("horizon_job_last_evaluation_timestamp_seconds", "Unix time of the job's last evaluation.", ("job_id",)),
    Metric("horizon_jobs_ended_total", "Jobs that ended, by how and whose.", ("project", "user", "state")),
    Metric("horizon_queued_jobs", "Jobs in the queue, by whose.", ("project", "user")),
    Metric(
        "horizon_ended_job_timestamp_seconds",
        f"Unix time when a job ended, of the {NEWEST_ENDED} that ended last.",
        ("ended_job", "name", "user", "project", "state", "reason"),
    ),
    Metric("horizon_job_ranks", "Devices that compute the job together.", ("job_id",)),
    Metric("horizon_job_progress_ratio", "Steps done of steps in all, 0 to 1.", ("job_id",)),
    Metric(
        "horizon_model_flops_utilization_ratio",
        "The model's own FLOPs per second in the last step, of what the device's matrix products were measured to "
        "reach.",
        ("job_id",),
    ),
    Metric(
        "horizon_transfer_overlap_ratio",
        f"Share of the transfer time hidden by compute over the last {OVERLAP_WINDOW_STEPS} steps; 1 is fully hidden.",
        ("job_id", "direction"),
    ),
    Metric(
        "horizon_host_memory_planned_bytes",
        "Host memory the plan gives a running job, by component.",
        ("job_id", "component"),
    ),
    Metric(
        "horizon_device_memory_planned_bytes",
        "Device memory the plan gives a running job, by component.",
        ("job_id", "device", "component"),
    ),
    Metric(
        "horizon_checkpoint_last_success_timestamp_seconds",
        "Unix time of the job's newest complete checkpoint.",
        ("job_id",),
    ),
    Metric(
        "horizon_device_seconds_total", "Seconds of turns on a device, by who used them.", ("project", "user", "device")
    ),
    Metric("horizon_device_turns_total", "Turns that ended.", ("device",)),
    Metric(
        "horizon_device_turn_wait_seconds",
        "Time from a job's request for the device to its turn.",
        ("device",),
        _TURN_BUCKETS_S,
    ),
    Metric(
        "horizon_device_handover_seconds",
        "Time from the end of one job's work on the device to the start of the next job's.",
        ("device",),
        _HANDOVER_BUCKETS_S,
    ),
    Metric("horizon_resident_jobs", "Jobs in host memory that share a device.", ("device",)),
    Metric("horizon_job_share_ratio", "Part of its device's time that a resident job has, 0 to 1.", ("job_id",)),
    Metric("horizon_share_use_seconds", "Decayed device seconds that decide whose turn is next.", ("project", "user")),
    Metric("horizon_project_weight", "Weight of a project that has used the device lately.", ("project",)),
    Metric("horizon_user_weight", "Weight of a user who has used the device lately.", ("user",)),
    Metric(
        "horizon_layer_compile_seconds_total",
        "Seconds that the daemon compiled layers before a job needed them; those of a worker are in its job's events.",
    ),
    Metric("horizon_turn_overruns_total", "Turns that a worker did not give back in time."),
    Metric("horizon_jobs_displaced_total", "Resident jobs that were unloaded to make room for a waiting one."),
    Metric(
        "horizon_oldest_queued_timestamp_seconds",
        "Unix time since which the job that has waited longest is queued; 0 while none is.",
    ),
    Metric("horizon_node_open", "1 while jobs may start; 0 while an admin has cordoned or drained the node."),
    Metric("horizon_fleet_boxes", "Machines that jobs are sent to, by state: open, closed or lost.", ("state",)),
    Metric("horizon_fleet_nodes", "Further nodes that jobs may use, by state: free, busy or lost.", ("state",)),
    Metric(
        "horizon_maintenance_start_timestamp_seconds",
        "Unix time when the maintenance window begins or began; 0 while none is set.",
    ),
    Metric(
        "horizon_maintenance_end_timestamp_seconds",
        "Unix time when the maintenance window ends; 0 while none is set.",
    ),
    Metric(
        "horizon_host_memory_promised_bytes",
        "Planned host memory of all resident jobs together, and of the model that answers prompts.",
    ),
    Metric(
        "horizon_shared_base_bytes",
        "Host memory of frozen weights under adapters, each base once for all resident jobs on it.",
    ),
    Metric("horizon_shared_base_jobs", "Resident jobs whose frozen weights are among these."),
    Metric("horizon_gpu_seconds_total", "Seconds of steps and evaluations that ran on a GPU.", ("project", "user")),
    Metric("horizon_host_memory_limit_bytes", "Host memory of the machine, or of the control group where lower."),
    Metric("horizon_host_memory_available_bytes", "Host memory that is free for jobs now."),
    Metric("horizon_disk_total_bytes", "Size of the disk of the state folder."),
    Metric("horizon_disk_free_bytes", "Free bytes on the disk of the state folder."),
    Metric(
        "horizon_tls_certificate_expiry_timestamp_seconds", "Unix time when the TLS certificate ends; 0 without TLS."
    ),
    Metric(
        "horizon_stored_bytes",
        "Bytes of datasets, models and checkpoints that a user stores.",
        ("user",),
    ),
    Metric("horizon_gpu_info", "1; the labels say which GPU a device is.", ("device", "name")),
    Metric("horizon_web_page_info", "1; the label says where the web page is.", ("url",)),
    Metric("horizon_upload_bytes_total", "Bytes of upload calls by result.", ("result",)),
    Metric("horizon_webhook_deliveries_total", "Attempts to deliver webhooks by outcome.", ("outcome",)),
    Metric("grpc_server_handled_total", "Finished gRPC calls.", ("grpc_service", "grpc_method", "grpc_code")),
    Metric(
        "grpc_server_handling_seconds",
        "Duration of gRPC calls; of a stream, until it ended.",
        ("grpc_service", "grpc_method"),
        _CALL_BUCKETS_S,
    ),
    Metric(
        "http_request_duration_seconds",
        "Duration of HTTP requests; of an event stream, until it ended.",
        ("method", "route", "code"),
        _CALL_BUCKETS_S,
    ),
)

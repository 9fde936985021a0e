"""The Lab board: who uses the machine, who waits, what ended, who stores how much."""

from __future__ import annotations

from boards.chart import (
    DAEMON_STARTED,
    FAILED,
    JOB_BOARD,
    JOB_PAGE,
    NODE_CLOSED,
    NODE_VARIABLE,
    PAGE_VARIABLE,
    QUEUED,
    RESIDENT,
    Board,
    Chart,
    Column,
    in_last_hour,
    named,
    quantile,
    rate,
    select,
)

_OLDEST = select("horizon_oldest_queued_timestamp_seconds")
_HELD = "instance_project_user_device:horizon_device_seconds:rate5m"
_ENDED = "instance_project_user_state:horizon_jobs_ended:increase1d"
_ALIVE = 'state!~"SUCCEEDED|FAILED|CANCELLED"'


def _hours(by: str) -> str:
    """Device hours of the whole range: of each minute the share that was held."""
    return f"sum by ({by}) (sum_over_time({select(_HELD)}[$__range:1m])) / 60"


_NOW = (
    Chart(
        title="Resident jobs",
        text="Jobs whose model is in host memory, or on its way there.",
        good="1 or more while jobs are queued.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        queries=[(f"sum({select('horizon_jobs', RESIDENT)})", "jobs")],
    ),
    Chart(
        title="Queued jobs",
        text="Jobs that wait for memory, a turn to load, or for a pause after a failure to end.",
        good="It falls over a day. 'horizon queue' says what each waits for.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        queries=[(f"sum({select('horizon_jobs', QUEUED)})", "jobs")],
    ),
    Chart(
        title="Longest wait",
        text="How long the oldest queued job has waited.",
        good="Below a day, the setting max_wait_s: a user who waits longer comes before all others.",
        unit="s",
        width=4,
        height=4,
        kind="number",
        warn=6 * 3600,
        bad=86400,
        queries=[(f"(time() - {_OLDEST} and {_OLDEST} > 0) or 0 * {_OLDEST}", "{{instance}}")],
    ),
    Chart(
        title="Failed in a day",
        text="Jobs that ended as FAILED in the last 24 hours.",
        good="0. The table of ended jobs below says whose they are and why.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        warn=1,
        bad=5,
        queries=[(f"round(sum({select(_ENDED, FAILED)})) or vector(0)", "jobs")],
    ),
    Chart(
        title="Devices in use",
        text="Part of the time that the devices were held by a job, over the last minutes.",
        good="Near 100 % while jobs are queued; jobs that load or save hold none.",
        unit="percentunit",
        width=4,
        height=4,
        kind="number",
        maximum=1,
        queries=[
            (
                f"clamp_max(sum({select(_HELD)}) / count(sum by (instance, device) "
                f"({select('horizon_resident_jobs')})), 1)",
                "held",
            )
        ],
    ),
    Chart(
        title="Next maintenance",
        text="Time until the maintenance window begins, below 0 once it has begun, and ends. Empty: none is set.",
        good="Known a day before: jobs are checkpointed at its start and go on after its end.",
        unit="s",
        width=4,
        height=4,
        kind="number",
        minimum=None,
        queries=[
            (f"({select('horizon_maintenance_start_timestamp_seconds')} > 0) - time()", "begins in"),
            (f"({select('horizon_maintenance_end_timestamp_seconds')} > 0) - time()", "ends in"),
        ],
    ),
)

_WHO = (
    Chart(
        title="Jobs on the machine",
        text="Every resident job: whose it is, how far it is, the device time that it still needs, and its part of the "
        "device. A job with half of the device takes twice its time left. Names link to the web page.",
        good="Progress grows; shares of one device add up to 100 %.",
        unit="string",
        width=24,
        height=7,
        kind="table",
        queries=[
            (named("horizon_job_progress_ratio"), ""),
            (named("horizon_job_remaining_seconds"), ""),
            (named("horizon_job_share_ratio"), ""),
            (named("horizon_tokens_per_second"), ""),
            (named("horizon_train_loss"), ""),
        ],
        columns=[
            Column(
                title="Job",
                of="name",
                links={
                    "Web page": JOB_PAGE + "${__data.fields.job_id}",
                    "Board": JOB_BOARD + "${__data.fields.job_id}",
                },
            ),
            Column(title="Owner", of="owner"),
            Column(title="Project", of="project"),
            Column(title="Progress", of="A", unit="percentunit"),
            Column(title="Device time left", of="B", unit="s"),
            Column(title="Share", of="C", unit="percentunit"),
            Column(title="Tokens per second", of="D", unit="short"),
            Column(title="Loss", of="E", unit="short"),
            Column(title="job_id", of="job_id"),
        ],
    ),
    Chart(
        title="Device time by user",
        text="Seconds of turns per second; the sum of a device is the part of the time that it is held.",
        good="Users with the same weight have bands of the same width while both have jobs.",
        unit="percentunit",
        kind="stacked",
        width=12,
        queries=[
            (
                f"sum by (user, project, device) ({select(_HELD)})",
                "{{user}} in {{project}} on {{device}}",
            )
        ],
    ),
    Chart(
        title="Device hours by user",
        text="Device hours in the whole time range of the board.",
        good="In the long run in the ratio of the weights, among users who always had jobs.",
        unit="h",
        kind="bars",
        width=6,
        queries=[(_hours("user"), "{{user}}")],
    ),
    Chart(
        title="Device hours by project",
        text="Device hours in the whole time range of the board, by the project that pays.",
        good="As agreed in the lab: 'horizon usage' has the accounts by month.",
        unit="h",
        kind="bars",
        width=6,
        queries=[(_hours("project"), "{{project}}")],
    ),
    Chart(
        title="Share of resident jobs",
        text="Part of its device's time that each resident job has.",
        good="Adds up to 100 % on every device.",
        unit="percentunit",
        kind="stacked",
        maximum=1,
        of_jobs=True,
        queries=[(named("horizon_job_share_ratio"), "{{name}} ({{owner}})")],
    ),
    Chart(
        title="Use against weight",
        text="Decayed device seconds divided by the weight. The lowest is next.",
        good="Lines of those who have jobs meet: they have a fair share.",
        unit="s",
        queries=[
            (
                f"sum by (instance, project) ({select('horizon_share_use_seconds')})"
                f" / on (instance, project) {select('horizon_project_weight')}",
                "project {{project}}",
            ),
            (
                f"{select('horizon_share_use_seconds')}"
                f" / on (instance, user) group_left () {select('horizon_user_weight')}",
                "{{user}} in {{project}}",
            ),
        ],
    ),
    Chart(
        title="Tokens per second by project",
        text="Real tokens that were trained on; padding is not counted.",
        good="Steady while the same jobs run.",
        unit="short",
        queries=[(rate("horizon_tokens_total", "project"), "{{project}}")],
    ),
    Chart(
        title="GPUs in use by user",
        text="GPU seconds of steps and evaluations per second; 0 while jobs run on the host.",
        good="The number of GPUs, while jobs are queued.",
        unit="short",
        kind="stacked",
        queries=[(rate("horizon_gpu_seconds_total", "project, user"), "{{user}} in {{project}}")],
    ),
)

_WAITING = (
    Chart(
        title="Queue by user",
        text="Jobs in the queue, by whose they are.",
        good="Nobody's band only grows.",
        unit="short",
        kind="stacked",
        queries=[(f"sum by (user, project) ({select('horizon_queued_jobs')})", "{{user}} in {{project}}")],
    ),
    Chart(
        title="Jobs by state",
        text="Jobs that have not ended.",
        good="PREPARING, STARTING and STOPPING pass within minutes.",
        unit="short",
        kind="stacked",
        queries=[(f"sum by (state) ({select('horizon_jobs', _ALIVE)})", "{{state}}")],
    ),
    Chart(
        title="Wait in the queue",
        text="From queued to the start of an attempt, over the last day.",
        good="p50 of minutes, p95 below max_wait_s (a day).",
        unit="s",
        queries=[
            (select("instance:horizon_job_queue_wait_seconds:p50_1d"), "p50"),
            (select("instance:horizon_job_queue_wait_seconds:p95_1d"), "p95"),
        ],
    ),
    Chart(
        title="Wait for a turn",
        text="From a resident job's request for the device to its turn, over the last hour.",
        good="About a time slice for each other job that shares the device.",
        unit="s",
        queries=[
            (select("instance_device:horizon_device_turn_wait_seconds:p50_1h"), "{{device}} p50"),
            (select("instance_device:horizon_device_turn_wait_seconds:p95_1h"), "{{device}} p95"),
        ],
    ),
    Chart(
        title="Hand-over",
        text="How long the device was idle between two jobs while one waited for it, over the last hour.",
        good="Milliseconds: far below a time slice.",
        unit="s",
        queries=[
            (quantile(0.5, "horizon_device_handover_seconds", "device", window="1h"), "{{device}} p50"),
            (select("instance_device:horizon_device_handover_seconds:p95_1h"), "{{device}} p95"),
        ],
    ),
    Chart(
        title="Turns and residents",
        text="Turns that ended, per second, and jobs that share each device or a base of adapters.",
        good="No turns while one job has the device alone.",
        unit="short",
        queries=[
            (rate("horizon_device_turns_total", "device"), "{{device}} turns per second"),
            (select("horizon_resident_jobs"), "{{device}} jobs"),
            (select("horizon_shared_base_jobs"), "jobs on shared bases"),
        ],
    ),
    Chart(
        title="Displaced jobs and overruns",
        text="In the last hour: jobs that were unloaded to make room, and turns that were not given back in time.",
        good="No overruns. Displaced jobs are normal where more jobs wait than fit.",
        unit="short",
        queries=[
            (in_last_hour("horizon_jobs_displaced_total"), "displaced"),
            (in_last_hour("horizon_turn_overruns_total"), "overruns"),
            (in_last_hour("horizon_layer_compile_seconds_total"), "seconds of compiling ahead"),
        ],
    ),
)

_ENDS = (
    Chart(
        title="Ended in a day",
        text="Jobs that ended in the last 24 hours, by how.",
        good="Mostly SUCCEEDED.",
        unit="short",
        kind="bars",
        width=6,
        queries=[(f"round(sum by (state) ({select(_ENDED)}))", "{{state}}")],
    ),
    Chart(
        title="Failed in a day, by user",
        text="Jobs that ended as FAILED in the last 24 hours.",
        good="Nothing above 0.",
        unit="short",
        kind="bars",
        width=6,
        warn=1,
        bad=5,
        queries=[(f"round(sum by (user, project) ({select(_ENDED, FAILED)}))", "{{user}} in {{project}}")],
    ),
    Chart(
        title="What went wrong",
        text="Skipped steps, workers started again and moves to FAILED in the last hour.",
        good="All 0. Skipped steps now and then do no harm.",
        unit="short",
        width=12,
        queries=[
            (in_last_hour("horizon_steps_skipped_total"), "skipped steps"),
            (in_last_hour("horizon_worker_restarts_total"), "worker restarts"),
            (in_last_hour("horizon_job_transitions_total", 'to="FAILED"'), "failed jobs"),
        ],
    ),
    Chart(
        title="Jobs that ended last",
        text="The 20 jobs that ended last, with the reason of those that did not succeed. Names link to the web page, "
        "which has the message and the log.",
        good="SUCCEEDED.",
        unit="string",
        width=24,
        height=9,
        kind="table",
        queries=[(f"{select('horizon_ended_job_timestamp_seconds')} * 1000", "")],
        columns=[
            Column(title="Ended", of="A", unit="dateTimeFromNow"),
            Column(title="Job", of="name", links={"Web page": JOB_PAGE + "${__data.fields.ended_job}"}),
            Column(title="User", of="user"),
            Column(title="Project", of="project"),
            Column(title="State", of="state"),
            Column(title="Reason", of="reason"),
            Column(title="job_id", of="ended_job"),
        ],
    ),
)

_STORAGE = (
    Chart(
        title="Stored by user",
        text="Datasets, models and checkpoints, counted once a minute.",
        good="Below each user's quota: 'horizon quota'.",
        unit="bytes",
        kind="stacked",
        queries=[(f"sum by (user) ({select('horizon_stored_bytes')})", "{{user}}")],
    ),
    Chart(
        title="Disk of the state folder",
        text="What is stored for all users, and everything else on that disk.",
        good="More than 10 % free, and no steady fall.",
        unit="bytes",
        queries=[
            (select("horizon_disk_free_bytes"), "free"),
            (select("horizon_disk_total_bytes"), "total"),
        ],
    ),
    Chart(
        title="Uploads",
        text="Bytes of upload calls by result; partial means that more is to come.",
        good="Little is refused or cut.",
        unit="Bps",
        queries=[(rate("horizon_upload_bytes_total", "result"), "{{result}}")],
    ),
)

LAB = Board(
    uid="horizon-lab",
    title="horizon / Lab",
    text="Who uses the machine, who waits, what ended, and who stores how much.",
    variables=(NODE_VARIABLE, PAGE_VARIABLE),
    rows=(
        ("Now", _NOW),
        ("Who uses the machine", _WHO),
        ("Queue and waits", _WAITING),
        ("Jobs that ended", _ENDS),
        ("Storage", _STORAGE),
    ),
    marks=(DAEMON_STARTED, NODE_CLOSED),
    since="now-24h",
    links={"Web page": "${page}/"},
)

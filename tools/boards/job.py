"""The Job board: everything of one job, with marks for what happened to it."""

from __future__ import annotations

from boards.chart import (
    DAEMON_STARTED,
    INSTANCE,
    JOB,
    JOB_PAGE,
    NODE_CLOSED,
    NODE_VARIABLE,
    PAGE_VARIABLE,
    Board,
    Chart,
    Column,
    Mark,
    Variable,
    of_job,
    select,
)

_H2D = 'direction="h2d"'
_FIRST, _LATER = 'attempt="1"', 'attempt!="1"'
_OF_PROJECT = 'project=~"$project"'
_JOBS = f'horizon_job_info{{{INSTANCE}, project=~"$project", owner=~"$owner"}}'

_NOW = (
    Chart(
        title="Which job",
        text="Whose it is, and what it trains on what. Its name links to the web page.",
        good="It is the job that you mean: choose project, owner and job at the top.",
        unit="string",
        width=24,
        height=4,
        kind="table",
        queries=[(f"last_over_time({of_job('horizon_job_info')}[$__range])", "")],
        columns=[
            Column(title="Job", of="name", links={"Web page": JOB_PAGE + "${__data.fields.job_id}"}),
            Column(title="Owner", of="owner"),
            Column(title="Project", of="project"),
            Column(title="Model", of="model"),
            Column(title="Dataset", of="dataset"),
            Column(title="Node", of="instance"),
            Column(title="job_id", of="job_id"),
        ],
    ),
    Chart(
        title="Progress",
        text="Steps done of steps in all.",
        good="Grows.",
        unit="percentunit",
        width=4,
        height=4,
        kind="number",
        maximum=1,
        queries=[(of_job("horizon_job_progress_ratio"), "done")],
    ),
    Chart(
        title="Time left",
        text="Device time that it still needs, and that time divided by its share: when it ends if the company stays.",
        good="Falls by a second each second, or faster.",
        unit="s",
        width=4,
        height=4,
        kind="number",
        queries=[
            (of_job("horizon_job_remaining_seconds"), "on the device"),
            (
                f"{of_job('horizon_job_remaining_seconds')}"
                f" / on (instance, job_id) {of_job('horizon_job_share_ratio')}",
                "with its share",
            ),
        ],
    ),
    Chart(
        title="Loss",
        text="Train loss of the last step, and loss of the last evaluation.",
        good="Falls; the two stay close.",
        unit="short",
        width=4,
        height=4,
        kind="number",
        minimum=None,
        queries=[(of_job("horizon_train_loss"), "train"), (of_job("horizon_eval_loss"), "eval")],
    ),
    Chart(
        title="Last step",
        text="Time since its last finished step, or since it began to run.",
        good="A few steps' time, and a few time slices for each job that shares the device.",
        unit="s",
        width=4,
        height=4,
        kind="number",
        warn=1800,
        bad=3600,
        queries=[(f"time() - {of_job('horizon_job_last_step_timestamp_seconds')}", "ago")],
    ),
    Chart(
        title="Newest checkpoint",
        text="Age of the newest checkpoint: what a crash of the machine would cost.",
        good="Below checkpoint.every_minutes (60 by default).",
        unit="s",
        width=4,
        height=4,
        kind="number",
        warn=2 * 3600,
        bad=12 * 3600,
        queries=[(f"time() - {of_job('horizon_checkpoint_last_success_timestamp_seconds')}", "ago")],
    ),
    Chart(
        title="Running since",
        text="Time since its present attempt began. A pause, a displacement and a restart each begin a new one.",
        good="Hours. Attempts that begin again and again: 'horizon job get' has the reason.",
        unit="s",
        width=4,
        height=4,
        kind="number",
        queries=[(f"time() - {of_job('horizon_job_attempt_start_timestamp_seconds')}", "attempt {{attempt}}")],
    ),
)

_LEARNING = (
    Chart(
        title="Loss over time",
        text="Token-weighted mean loss of each step, of evaluations, and of each eval set.",
        good="All fall and flatten. Eval that rises while train falls: it learns by heart.",
        unit="short",
        width=12,
        height=10,
        minimum=None,
        queries=[
            (of_job("horizon_train_loss"), "train"),
            (of_job("horizon_eval_loss"), "eval"),
            (of_job("horizon_eval_set_loss"), "{{set}}"),
        ],
    ),
    Chart(
        title="Evaluations",
        text="Token accuracy of each eval set, and the share of prompts that were answered as the data does.",
        good="Rise and flatten.",
        unit="percentunit",
        width=12,
        height=10,
        maximum=1,
        queries=[
            (of_job("horizon_eval_set_accuracy"), "accuracy {{set}}"),
            (of_job("horizon_eval_set_exact_match"), "exact match {{set}}"),
        ],
    ),
    Chart(
        title="Gradient norm",
        text="Global norm before clipping.",
        good="Falls at the beginning, then steady. Peaks that grow: lower the learning rate.",
        unit="short",
        queries=[(of_job("horizon_grad_norm"), "norm")],
    ),
    Chart(
        title="Learning rate",
        text="As used in the last step.",
        good="The schedule of the job file: a warm-up, then a fall.",
        unit="sci",
        queries=[(of_job("horizon_learning_rate"), "learning rate")],
    ),
    Chart(
        title="Figures of the method",
        text="What methods other than cross-entropy report besides their loss, such as rewards/margins of dpo.",
        good="dpo and its kin: margins and accuracies rise. Empty for sft and pretrain.",
        unit="short",
        minimum=None,
        queries=[(of_job("horizon_method_figure"), "{{component}}")],
    ),
)

_SPEED = (
    Chart(
        title="Tokens per second",
        text="Real tokens per second in the last step, while it had the device.",
        good="Steady, and near the plan's prediction ('horizon job get').",
        unit="short",
        queries=[(of_job("horizon_tokens_per_second"), "tokens per second")],
    ),
    Chart(
        title="Transfer overlap",
        text="Share of the copying time that compute hid, over the last 20 steps.",
        good="Above 90 %. Lower: more tokens a step, or fewer transfers (docs/performance.md).",
        unit="percentunit",
        maximum=1,
        queries=[(of_job("horizon_transfer_overlap_ratio"), "{{direction}}")],
    ),
    Chart(
        title="Use of the device",
        text="The model's own FLOPs of what the device's matrix products reach, and its share of the device.",
        good="The share that its owner is due; of the peak, what docs/performance.md says of its size.",
        unit="percentunit",
        maximum=1,
        queries=[
            (of_job("horizon_model_flops_utilization_ratio"), "of peak"),
            (of_job("horizon_job_share_ratio"), "share of the device"),
            (of_job("horizon_transfer_overlap_ratio", _H2D), "prefetch hidden"),
        ],
    ),
    Chart(
        title="Progress over time",
        text="Steps done of steps in all.",
        good="A straight line while the company on the device stays the same.",
        unit="percentunit",
        maximum=1,
        width=12,
        queries=[(of_job("horizon_job_progress_ratio"), "done")],
    ),
    Chart(
        title="Being loaded",
        text="How long it has been PREPARING or STARTING, before its first turn. Empty while it runs.",
        good="Minutes. Large datasets and models take longer the first time.",
        unit="s",
        width=12,
        queries=[(f"time() - {of_job('horizon_job_loading_since_timestamp_seconds')}", "{{state}}")],
    ),
)

_MEMORY = (
    Chart(
        title="Host memory in use",
        text="What it holds, by component.",
        good="Flat after the first steps.",
        unit="bytes",
        kind="stacked",
        queries=[(of_job("horizon_host_memory_bytes"), "{{component}}")],
    ),
    Chart(
        title="Host memory planned",
        text="What its plan gives it, by component.",
        good="Each component is at least what is in use.",
        unit="bytes",
        kind="stacked",
        queries=[(of_job("horizon_host_memory_planned_bytes"), "{{component}}")],
    ),
    Chart(
        title="Host memory against the plan",
        text="All components together.",
        good="In use stays below planned.",
        unit="bytes",
        queries=[
            (f"sum({of_job('horizon_host_memory_bytes')})", "in use"),
            (f"sum({of_job('horizon_host_memory_planned_bytes')})", "planned"),
        ],
    ),
    Chart(
        title="Device memory in use",
        text="Peak of the last step, by component.",
        good="Flat; cached, which no plan counts, stays small.",
        unit="bytes",
        width=12,
        kind="stacked",
        queries=[(of_job("horizon_device_memory_bytes"), "{{device}} {{component}}")],
    ),
    Chart(
        title="Device memory planned",
        text="What its plan gives it, by component.",
        good="Each component is at least what is in use.",
        unit="bytes",
        width=12,
        kind="stacked",
        queries=[(of_job("horizon_device_memory_planned_bytes"), "{{device}} {{component}}")],
    ),
)

_MARKS = (
    Mark(
        name="Start",
        color="green",
        query=f"{of_job('horizon_job_attempt_start_timestamp_seconds', _FIRST)} * 1000",
        title="The job starts",
    ),
    Mark(
        name="Continued",
        color="orange",
        query=f"{of_job('horizon_job_attempt_start_timestamp_seconds', _LATER)} * 1000",
        title="Attempt {{attempt}} begins",
        text="After a pause, a displacement or a failure: 'horizon job get' has the reason.",
    ),
    Mark(
        name="Checkpoint",
        color="blue",
        query=f"{of_job('horizon_checkpoint_last_success_timestamp_seconds')} * 1000",
        title="Checkpoint written",
    ),
    Mark(
        name="Evaluation",
        color="yellow",
        query=f"{of_job('horizon_job_last_evaluation_timestamp_seconds')} * 1000",
        title="Evaluation",
    ),
    DAEMON_STARTED,
    NODE_CLOSED,
)

JOB_OF_LAB = Board(
    uid="horizon-job",
    title="horizon / Job",
    text="Everything of one job: learning, speed, memory, and marks for start, checkpoint, evaluation and restart.",
    variables=(
        NODE_VARIABLE,
        PAGE_VARIABLE,
        Variable(name="project", label="Project", query=f"label_values({select('horizon_job_info')}, project)"),
        Variable(
            name="owner",
            label="Owner",
            query=f"label_values({select('horizon_job_info', _OF_PROJECT)}, owner)",
        ),
        # Of the whole range: a job that has ended is still chosen by its name.
        Variable(
            name="job",
            label="Job",
            query=f"query_result(last_over_time({_JOBS}[$__range]))",
            pattern='/job_id="(?<value>[^"]+)".*name="(?<text>[^"]+)"/',
            several=False,
        ),
    ),
    rows=(("Now", _NOW), ("Learning", _LEARNING), ("Speed", _SPEED), ("Memory", _MEMORY)),
    marks=_MARKS,
    links={"This job's web page": JOB_PAGE + "${job}"},
)
assert all(JOB in query for _, charts in JOB_OF_LAB.rows for chart in charts for query, _ in chart.queries)

"""What jobs read from drives and write to them adds up, by drive."""

from __future__ import annotations

import dataclasses

from prometheus_client import generate_latest
from tests.unit.telemetry.test_metrics import _job, _plan, _step

from horizon_server.figures import DriveFigures
from horizon_server.records.execution import Execution, OnDrives
from horizon_server.telemetry.metrics import Metrics


def test_what_jobs_read_from_drives_and_write_adds_up_by_drive() -> None:
    metrics = Metrics()
    drives = OnDrives(units=(1,), planes=("exp_avg",), folders=("/nvme0", "/nvme1"))
    job = dataclasses.replace(_job(), plan=dataclasses.replace(_plan(), execution=Execution(drives=drives)))
    moved = tuple(DriveFigures(read_bytes=10 * number, written_bytes=number) for number in (1, 2))
    for number in (1, 2):
        metrics.on_payload(job, _step(number, drives=moved))
    text = generate_latest(metrics.registry).decode()
    assert 'horizon_drive_read_bytes_total{drive="/nvme1"} 40.0' in text
    assert 'horizon_drive_written_bytes_total{drive="/nvme0"} 2.0' in text

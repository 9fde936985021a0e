"""A job spec has types: a checker finds a misspelt key, and every field of the schema is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

from horizon_client import job_spec_types
from horizon_client.cli.job_file import job_schema

HEAD = """from horizon_client import Client
from horizon_client.job_spec_types import JobSpec

def job(client: Client, spec: JobSpec) -> None:
"""
RIGHT = """
    client.jobs.submit(
        {
            "name": "first",
            "model": "tiny-base",
            "dataset": [{"prompt": "a", "completion": "b"}],
            "train": {"epochs": 2, "trainable": "lora", "lora": {"rank": 8}, "packing": True},
            "eval": {"sets": {"held": "held.jsonl"}, "generate": {"prompts": 4}},
        }
    )
    job = client.jobs.get("first")
    client.jobs.submit({**job.spec, "name": "again"})
    print(job.state == "SUCCEEDED", job.spec["train"]["learning_rate"])
"""
WRONG = {
    '    spec = {"name": "n", "model": "m", "dataset": "d", "trian": {}}\n': '"trian"',
    '    spec = {"name": "n", "model": "m", "dataset": "d", "train": {"lr": 1}}\n': '"lr"',
    '    spec = {"name": "n", "model": "m"}\n': '"dataset"',
    '    spec = {"name": "n", "model": "m", "dataset": "d", "method": "spo"}\n': '"method"',
    '    client.jobs.submit({"name": "n", "model": "m", "dataset": "d", "trian": {}})\n': "JobSpec",
    '    print(client.jobs.get("n").state == "SUCEEDED")\n': "SUCEEDED",
}


def test_mypy_passes_a_right_spec_and_finds_each_mistake(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(HEAD + RIGHT)
    (tmp_path / "wrong.py").write_text(HEAD + "".join(WRONG))
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-google.*,grpc.*]\nignore_missing_imports = true\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", ".cache", "."]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    by_line = [line for line in found.stdout.splitlines() if "error:" in line]
    first = len(HEAD.splitlines()) + 1
    for number, text in enumerate(WRONG.values(), first):
        said = [line for line in by_line if line.startswith(f"wrong.py:{number}:")]
        assert said and text in said[0], (text, found.stdout)
    assert not [line for line in by_line if line.startswith("right.py")], found.stdout


def test_the_types_have_every_field_of_the_schema_and_no_other() -> None:
    schema = job_schema()
    sections: dict[str, Any] = {"JobSpec": schema, **schema["$defs"]}
    for name, section in sections.items():
        kind = getattr(job_spec_types, name)
        assert set(get_type_hints(kind)) == set(section["properties"]), name
        assert kind.__required_keys__ == set(section.get("required", ())), name

"""What is sent to a box with a job."""

from __future__ import annotations

from horizon_server.codec import from_plain, to_plain
from horizon_server.services.fleet.records import Needed, SentJob
from horizon_server.spec import parse_job_spec


def test_names_become_the_ids_that_a_box_has() -> None:
    spec = parse_job_spec(
        {
            "name": "j",
            "model": "m",
            "dataset": "d",
            "eval_dataset": "e",
            "eval": {"sets": {"more": "f"}},
            "node": "box2",
            "report_to": ["mlflow"],
            "train": {"max_steps": 1},
        }
    )
    ids = {"model": "model_1", "dataset": "dataset_1", "eval_dataset": "dataset_2", "eval.sets.more": "dataset_3"}
    sent = SentJob(job_id="job_1", project="p", priority=0, spec=spec, ids=ids)
    named = from_plain(SentJob, to_plain(sent)).named_by_ids
    assert (named.model, named.dataset, named.eval_dataset) == ("model_1", "dataset_1", "dataset_2")
    assert named.eval.sets == {"more": "dataset_3"}
    # It stays there, and trackers follow its events where it was submitted.
    assert (named.node, named.report_to) == ("", ())
    assert sent.spec == spec


def test_a_copy_has_a_name_that_says_what_it_is() -> None:
    def name(given: str, digest: str = "0123456789abcdef") -> str:
        return Needed(kind="model", name=given, digest=digest, files=()).name_there

    assert name("tiny") == "tiny-0123456789ab"
    assert name("Qwen/Qwen3-0.6B") == "qwen-qwen3-0-6b-0123456789ab"
    assert name("x" * 63) == "x" * 40 + "-0123456789ab"
    assert name("tiny", "f" * 64) != name("tiny")

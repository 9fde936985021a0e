"""Chats with weights through the daemon: from the pushed file to the loss of the first step, and what is said of a
wrong weight."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.both_daemons import AnyDaemon, demo_spec, process_only
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from horizon_client import Client, InvalidRequest
from horizon_server.demo.recipe import write_demo_model

Push = Callable[[Client], None]
# Of the two replies of each chat.
WEIGHTS = [(1, 0.25), (0, 3), (0.5, 0.5), (2, 1), (1, 0), (10, 0.1)]


def rows() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"Why {number}?"},
                {"role": "assistant", "content": f"Because of {number}.", "weight": first},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes, quite sure.", "weight": second},
            ]
        }
        for number, (first, second) in enumerate(WEIGHTS)
    ]


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    file = folder / "weighted.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def plain_losses(model_folder: Path) -> tuple[float, float]:
    """The weighted mean over all replies, and the plain one over those that have a weight, by transformers alone."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    losses, weights = [], []
    for row, given in zip(rows(), WEIGHTS, strict=True):
        chat = [{key: value for key, value in message.items() if key != "weight"} for message in row["messages"]]
        encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        replies, own = iter(given), []
        for is_reply, run in itertools.groupby(encoded["assistant_masks"]):
            weight = next(replies) if is_reply else 0
            own += [weight for _ in run]
        ids = torch.tensor(encoded["input_ids"])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        losses.append(functional.cross_entropy(logits, ids[1:], reduction="none").double())
        weights.append(torch.tensor(own[1:], dtype=torch.float64))
    all_losses, all_weights = torch.cat(losses), torch.cat(weights)
    weighted = float((all_losses * all_weights).sum() / all_weights.sum())
    return weighted, float(all_losses[all_weights > 0].mean())


@process_only("the training itself")
def test_a_pushed_weight_is_in_the_loss_of_the_job(
    make_daemon: Callable[..., AnyDaemon], push_demo: Push, tmp_path: Path
) -> None:
    daemon = make_daemon()
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        file = write(tmp_path, *rows())
        client.datasets.push([file], name="weighted")
        shown = client.datasets.preview("weighted", model="demo-model", num_rows=1).rows[0]
        assert [(span.text, span.weight) for span in shown.spans if span.trained] == [
            ("Because of 0.<|im_end|>", None),
            ("Yes, quite sure.<|im_end|>", 0.25),
        ]
        # All rows are one step.
        spec = demo_spec(max_steps=2, tokens_per_step=4096)
        client.datasets.push([file], name="held")
        job = client.jobs.submit({**spec, "dataset": "weighted", "eval_dataset": "held"})
        events = list(client.jobs.watch(job.job_id))
        done = client.jobs.get(job.job_id)
        assert done.state == "SUCCEEDED", done.message
        weighted, plain = plain_losses(write_demo_model(tmp_path / "model"))
        assert abs(weighted - plain) > 1e-3 * plain, "the weights make a difference"
        losses = [event.loss for event in events if event.kind == "step"]
        evals = [event.eval_loss for event in events if event.kind == "eval"]
        assert losses[0] == pytest.approx(weighted, rel=1e-6)
        assert evals[0] == pytest.approx(plain, rel=1e-6)
        texts = [event.text for event in events if event.kind == "message"]
        assert any("some answers have a weight" in text for text in texts)


def test_a_wrong_weight_is_named_with_file_line_and_field(daemon: AnyDaemon, tmp_path: Path) -> None:
    wrong = rows()[0]
    wrong["messages"][0]["weight"] = 0.5
    wrong["messages"][3]["weight"] = "0.5"
    file = write(tmp_path, rows()[1], wrong)
    with daemon.client(daemon.user("ada")) as client, pytest.raises(InvalidRequest) as caught:
        client.datasets.push([file], name="wrong")
    assert [violation.description for violation in caught.value.violations] == [
        f"{file}:2: messages[0].weight is 0.5; it must be 0 or 1: only an assistant's message can be weighted "
        "otherwise",
        f"{file}:2: messages[3].weight is '0.5'; it must be 0, or a number from 0.001 to 100",
    ]
    assert [violation.field for violation in caught.value.violations] == [
        f"{file}:2:messages[0].weight",
        f"{file}:2:messages[3].weight",
    ]

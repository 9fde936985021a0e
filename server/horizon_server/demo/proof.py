"""The demo's proof, in a process of its own: plain torch and transformers, and not a line of the engine.

Reads {before, after, held_out, prompts} as JSON from standard input and writes {loss_before, loss_after, samples,
num_ended} to standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

_NEW_TOKENS = 40


def main() -> int:
    """Entry point."""
    quiet: Any = transformers_logging.disable_progress_bar
    quiet()
    request = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(request["after"])
    chats = [json.loads(line)["messages"] for line in Path(request["held_out"]).read_text("utf-8").splitlines()]
    before, after = _load(request["before"]), _load(request["after"])
    samples, num_ended = [], 0
    for prompt in request["prompts"]:
        answer, has_ended = _answer(after, tokenizer, prompt)
        samples.append({"prompt": prompt, "before": _answer(before, tokenizer, prompt)[0], "after": answer})
        num_ended += has_ended
    result = {
        "loss_before": held_out_loss(before, tokenizer, chats),
        "loss_after": held_out_loss(after, tokenizer, chats),
        "samples": samples,
        "num_ended": num_ended,
    }
    json.dump(result, sys.stdout)
    return 0


def _load(folder: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def held_out_loss(model: Any, tokenizer: Any, chats: list[list[dict[str, str]]]) -> float:
    """Return the mean loss over all assistant tokens, by the template's own generation markers."""
    total, count = 0.0, 0
    for chat in chats:
        encoded = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        ids = encoded["input_ids"]
        mask = torch.as_tensor(encoded["assistant_masks"]).reshape(ids.shape)[:, 1:].bool()
        logits = model(ids).logits[:, :-1]
        total += float(functional.cross_entropy(logits[mask], ids[:, 1:][mask], reduction="sum"))
        count += int(mask.sum())
    return total / count


@torch.no_grad()
def _answer(model: Any, tokenizer: Any, prompt: str) -> tuple[str, bool]:
    """Return the answer, and whether it ended by itself: at a token of the folder's own generation_config.json."""
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**encoded, max_new_tokens=_NEW_TOKENS, do_sample=False)
    tokens = output[0, encoded["input_ids"].shape[1] :].tolist()
    listed = model.generation_config.eos_token_id
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip(), tokens[-1] in (listed if isinstance(listed, list) else [listed])


if __name__ == "__main__":
    sys.exit(main())

"""DPO as a loss of your own: the node computes log-probabilities, this program the loss and its derivative, without
torch.

    python examples/dpo.py --model tiny-base --data pairs.jsonl --steps 20

A row has `prompt`, `chosen` and `rejected`. Source: Rafailov et al. (arXiv 2305.18290), equation 7.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horizon_client import Client
from horizon_client.sessions import Session

BETA = 0.1


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


def documents_of(session: Session, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Two documents of each row, chosen and rejected, whose answers are their targets."""
    texts = [row["prompt"] + text for row in rows for text in ("", row["chosen"], row["rejected"])]
    found = [one.prompt_tokens for one in session.sample(texts, max_tokens=0, prompt_logprobs=True).result()]
    documents = []
    for prompt, chosen, rejected in zip(found[::3], found[1::3], found[2::3], strict=True):
        for whole in (chosen, rejected):
            # The prompt's last token may be another one with an answer behind it.
            before = num_shared(prompt, whole) - 1
            documents.append({"tokens": whole, "targets": [-100] * before + [*whole[before + 1 :], -100]})
    return documents


def main() -> None:
    """Train on pairs of a JSON lines file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=4, help="pairs of a step")
    arguments = parser.parse_args()
    with arguments.data.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, arguments.steps * arguments.pairs)]
    with Client() as client, client.session(arguments.model, lora={"rank": 16}) as session:
        steps = [rows[i : i + arguments.pairs] for i in range(0, len(rows), arguments.pairs)]
        batches = [documents_of(session, of_step) for of_step in steps]
        # Of the weights before the first step, with which DPO compares.
        references = [session.forward(batch) for batch in batches]
        for step, (batch, reference) in enumerate(zip(batches, references, strict=True)):
            of_references = [sum(values) for values in reference.result().logprobs]
            logprobs = [sum(values) for values in session.forward(batch).result().logprobs]
            gains = [BETA * (now - before) for now, before in zip(logprobs, of_references, strict=True)]
            loss, weighted = 0.0, []
            for pair in range(len(batch) // 2):
                margin = gains[2 * pair] - gains[2 * pair + 1]
                loss += math.log1p(math.exp(-margin)) * 2 / len(batch)
                # Minus the derivative of the loss by each log-probability of the chosen answer; of the rejected one it
                # is the opposite.
                slope = BETA / (1 + math.exp(margin)) * 2 / len(batch)
                for document, sign in zip(batch[2 * pair : 2 * pair + 2], (1, -1), strict=True):
                    weighted.append({**document, "weights": [sign * slope] * len(document["tokens"])})
            session.forward_backward(weighted)
            session.optim_step(1e-4, max_grad_norm=1.0)
            print(f"step {step + 1}: loss {loss:.4f}")
        print("saved as", session.save_state("dpo").result())


if __name__ == "__main__":
    main()

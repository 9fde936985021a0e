"""Supervised fine-tuning from the laptop: rows of a question and an answer, in a session with adapters.

python examples/supervised.py --model tiny-base --data gsm8k_train.jsonl --steps 20
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from horizon_client import Client


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


def main() -> None:
    """Train on the first rows of a JSON lines file with `question` and `answer`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    arguments = parser.parse_args()
    with arguments.data.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, arguments.steps * arguments.rows)]
    with Client() as client, client.session(arguments.model, lora={"rank": 16}) as session:
        for step in range(arguments.steps):
            of_step = rows[step * arguments.rows : (step + 1) * arguments.rows]
            # The node has the tokenizer: scoring a text says which tokens it has.
            texts = [text for row in of_step for text in (row["question"], f"{row['question']}\n{row['answer']}")]
            found = session.sample(texts, max_tokens=0, prompt_logprobs=True).result()
            questions, wholes = found[::2], found[1::2]
            num_trained = sum(
                len(w.prompt_tokens) - len(q.prompt_tokens) for q, w in zip(questions, wholes, strict=True)
            )
            batch = []
            for question, whole in zip(questions, wholes, strict=True):
                # The question's last token may be another one with an answer behind it.
                before = num_shared(question.prompt_tokens, whole.prompt_tokens) - 1
                trained = len(whole.prompt_tokens) - 1 - before
                batch.append(
                    {
                        "tokens": whole.prompt_tokens,
                        # A mean over the trained tokens of the step.
                        "weights": [0.0] * before + [1 / num_trained] * trained + [0.0],
                    }
                )
            computed = session.forward_backward(batch)
            session.optim_step(2e-4, max_grad_norm=1.0)
            print(f"step {step + 1}: loss {computed.result().loss:.4f}")
        print("saved as", session.save_state("supervised").result())


if __name__ == "__main__":
    main()

"""GRPO from the laptop: the model answers questions, a regular expression scores the answers, and the model learns from
them, in one session and with the same weights in memory.

    python examples/grpo.py --model tiny-base --data gsm8k_train.jsonl --steps 20
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
from pathlib import Path
from typing import Any

from horizon_client import Client

NUMBER = re.compile(r"-?\d+")


def reward_of(answer: str, expected: str) -> float:
    """1 where the last number of an answer is the expected one, a little where there is a number at all."""
    numbers = NUMBER.findall(answer.replace(",", ""))
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1] == expected else 0.1


def main() -> None:
    """Train on questions of a JSON lines file with `question` and `answer`, whose last number is the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--questions", type=int, default=4, help="questions of a step")
    parser.add_argument("--answers", type=int, default=8, help="answers to each, which are compared with each other")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    arguments = parser.parse_args()
    with arguments.data.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, arguments.steps * arguments.questions)]
    with Client() as client, client.session(arguments.model, lora={"rank": 16}) as session:
        for step in range(arguments.steps):
            of_step = rows[step * arguments.questions : (step + 1) * arguments.questions]
            found = session.sample(
                [row["question"] for row in of_step],
                max_tokens=arguments.max_tokens,
                temperature=1.0,
                num_samples=arguments.answers,
                seed=step,
            ).result()
            batch: list[dict[str, Any]] = []
            rewards: list[float] = []
            for row, of_question in zip(of_step, found, strict=True):
                expected = NUMBER.findall(row["answer"].replace(",", ""))[-1]
                scores = [reward_of(answer.text, expected) for answer in of_question.answers]
                rewards += scores
                spread = statistics.pstdev(scores) or 1.0
                for answer, score in zip(of_question.answers, scores, strict=True):
                    before = [0.0] * (len(of_question.prompt_tokens) - 1)
                    advantage = (score - statistics.mean(scores)) / spread / len(of_question.answers)
                    batch.append(
                        {
                            "tokens": [*of_question.prompt_tokens, *answer.tokens],
                            "targets": [-100] * len(before) + [*answer.tokens, -100],
                            "logprobs": [*before, *answer.logprobs, 0.0],
                            "advantages": [*before, *[advantage] * len(answer.tokens), 0.0],
                        }
                    )
            computed = session.forward_backward(batch, loss="ppo")
            session.optim_step(1e-4, max_grad_norm=1.0)
            ratio = computed.result().figures["ratio"]
            print(f"step {step + 1}: reward {statistics.mean(rewards):.3f}, ratio {ratio:.6f}")
        print("saved as", session.save_state("grpo").result())


if __name__ == "__main__":
    main()

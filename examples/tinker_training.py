"""Train a model with Tinker's SDK and ask it: the loop is here, the model on the node.

    TINKER_BASE_URL=https://gpubox.lab.edu:7172 TINKER_API_KEY=tml-hzn_... \
        python examples/tinker_training.py --model tiny-base --tokenizer ./tiny-base

The model is a pushed one, or one of the hub that the node has; `--rank 0` trains all of its parameters. The tokenizer
is a folder here, or a name on the hub. Needs `pip install tinker`.
"""

from __future__ import annotations

import argparse
from typing import Any

import tinker
from transformers import AutoTokenizer

QUESTION = "Where is my parcel?"
ANSWERS = ["It is on its way.", "It left the depot today.", "It comes tomorrow."]


def datum(tokenizer: Any, question: str, answer: str) -> tinker.Datum:
    """A question with its answer, of which the answer is learned."""
    prompt, learned = tokenizer.encode(f"{question}\n"), tokenizer.encode(answer)
    tokens, weights = prompt + learned, [0.0] * len(prompt) + [1.0] * len(learned)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights[1:]}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.tokenizer)
    batch = [datum(tokenizer, QUESTION, answer) for answer in ANSWERS]
    num_learned = sum(sum(one.loss_fn_inputs["weights"].tolist()) for one in batch)

    with tinker.ServiceClient() as service:
        training = service.create_lora_training_client(base_model=options.model, rank=options.rank).result()
        for step in range(options.steps):
            # Both are sent before the first is awaited.
            computed = training.forward_backward(batch, "cross_entropy")
            stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-3))
            print(f"step {step + 1}: loss {computed.result().metrics['loss:sum'] / num_learned:.4f}")
            stepped.result()
        print("saved as", training.save_state("parcels").result().path)

        model = training.save_weights_and_get_sampling_client().result()
        prompt = tinker.ModelInput.from_ints(tokenizer.encode(f"{QUESTION}\n"))
        found = model.sample(prompt, num_samples=2, sampling_params=tinker.SamplingParams(max_tokens=16)).result()
        for sequence in found.sequences:
            print("answer:", repr(tokenizer.decode(sequence.tokens)))


if __name__ == "__main__":
    main()

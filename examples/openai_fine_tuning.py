"""Fine-tune a model with OpenAI's SDK and ask the result: upload, train, watch, chat.

    OPENAI_API_KEY=hzn_... python examples/openai_fine_tuning.py --base-url https://gpubox.lab.edu:7172/v1 --model MODEL

MODEL is a pushed model, or one of the hub that the node has. Needs `pip install openai`.
"""

from __future__ import annotations

import argparse
import json
import time

from openai import OpenAI

QUESTION = "Where is my parcel?"
ANSWERS = ["It is on its way.", "It left the depot today.", "It comes tomorrow."]


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    ai = OpenAI(base_url=options.base_url)

    rows = [
        {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]}
        for answer in ANSWERS * 4
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    data = ai.files.create(file=("parcels.jsonl", content), purpose="fine-tune")
    job = ai.fine_tuning.jobs.create(
        model=options.model,
        training_file=data.id,
        suffix="parcels",
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": options.epochs}}},
    )
    while job.status not in ("succeeded", "failed", "cancelled"):
        time.sleep(1)
        job = ai.fine_tuning.jobs.retrieve(job.id)
    for event in reversed(ai.fine_tuning.jobs.list_events(job.id, limit=100).data):
        print(event.message)
    if job.fine_tuned_model is None:
        raise SystemExit(f"the job is {job.status}: {job.error.message if job.error else ''}")

    print(f"\n{job.fine_tuned_model} answers {QUESTION!r}:")
    stream = ai.chat.completions.create(
        model=job.fine_tuned_model,
        messages=[{"role": "user", "content": QUESTION}],
        max_completion_tokens=32,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()

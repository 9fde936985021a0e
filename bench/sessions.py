"""What a call of a session takes, over the engine's own time for it: `forward_backward` of 16 short rows, from a client
through the daemon to the worker and back, over `CalledTrainer.accumulate` in this process on the same rows.

python -m bench.sessions              # about a minute on two cores
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tests.support.daemon_process import DaemonProcess
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from horizon_server.demo.recipe import write_demo_model
from horizon_server.engine.called_trainer import CalledTrainer
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.template import Template
from horizon_server.planning.ledger import micro_batch_tokens
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import Execution
from horizon_server.records.session import Datum, ForwardBackward
from horizon_server.spec import TrainSpec
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model
from horizon_server.worker.session_data import rows_of

_NUM_ROWS, _LENGTH = 16, 64


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = _write_model(folder)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(3, 250, (_NUM_ROWS, _LENGTH), generator=generator).tolist()
        # In turns, so that both see the same machine.
        with _engine(model, rows) as own, _session(folder, model, rows) as called:
            pairs = [(own(), called()) for _ in range(arguments.runs + 2)][2:]
    own_s, called_s = (median(pair[place] for pair in pairs) for place in (0, 1))
    ratios = sorted(called / own for own, called in pairs)
    print(f"the engine alone: {own_s * 1000:.0f} ms; a call of a session: {called_s * 1000:.0f} ms")
    quarter = len(ratios) // 4
    print(
        f"the call over the engine, median of {len(ratios)} pairs: {median(ratios):.2f} "
        f"(middle half {ratios[quarter]:.2f} to {ratios[-quarter - 1]:.2f})"
    )


def _write_model(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(write_demo_model(folder / "demo"))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


@contextmanager
def _engine(model: Path, rows: list[list[int]]) -> Iterator[Callable[[], float]]:
    """The seconds of one pass over the rows, in this process."""
    train = TrainSpec(sequence_length=_LENGTH, tokens_per_step=_NUM_ROWS * _LENGTH)
    found = open_for_training(model, train)
    store = HostStore.allocate(found.layout)
    load_model(store, model)
    execution = Execution(
        num_threads=available_cpus(),
        adds_up=True,
        micro_batch_tokens=micro_batch_tokens(found.shape.hidden_size, "host"),
    )
    template = Template.from_folder(model, layout=found.layout, recipe=train.recipe)
    device = HostDevice(num_threads=available_cpus())
    trainer = CalledTrainer(template, store, device, train.recipe, execution, num_steps=1)
    call = ForwardBackward(data=tuple(Datum(tokens=tuple(row), targets=(*row[1:], -100)) for row in rows))
    keys = itertools.count()
    yield lambda: _seconds(lambda: trainer.accumulate(*rows_of(call), key=next(keys)))
    trainer.close()
    device.close()


@contextmanager
def _session(folder: Path, model: Path, rows: list[list[int]]) -> Iterator[Callable[[], float]]:
    """The seconds of the same from a client."""
    daemon = DaemonProcess(folder / "state")
    try:
        daemon.start()
        with daemon.client(daemon.user("ada")) as client:
            client.models.push(model, name="bench")
            with client.session("bench", max_tokens=_LENGTH, max_tokens_per_call=_NUM_ROWS * _LENGTH) as session:
                data = [{"tokens": row} for row in rows]
                yield lambda: _seconds(lambda: session.forward_backward(data).result())
    finally:
        daemon.close()


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()

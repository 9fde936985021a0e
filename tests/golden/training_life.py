"""One life of a training process: go on from the newest whole checkpoint, train, save every few steps, until the end or
a kill."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.trainable import open_for_training
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.spec import LORA, LoraSpec, TrainSpec
from horizon_server.store.adapter_files import AdapterConfig
from horizon_server.store.checkpoint import AdapterExport, load_checkpoint, save_checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import with_compressed_states
from horizon_server.store.manifest import is_complete
from horizon_server.store.model_load import load_model

NUM_EPOCHS = 3
SAVE_EVERY = 4
# Of the model, which these lives do not change.
_DIGEST = "0" * 64
# A step, a save and what comes before it.
_MOST_MORE = 2
# Longer than anybody waits to kill it.
_REST_S = 600.0
LOSSES, CHECKPOINTS = "losses.txt", "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Life:
    """What a life works on: the model, the prepared data, and a folder for its losses and checkpoints."""

    model: Path
    data: Path
    work: Path
    lora: bool = False
    """Whether adapters are trained, with dropout, next to a frozen model."""
    compressed: bool = False
    """Whether optimizer states are."""

    def checkpoints(self) -> list[Path]:
        """Every folder that bears a checkpoint's name, the oldest first."""
        return sorted((self.work / CHECKPOINTS).glob("step-*"))

    def losses(self) -> list[tuple[int, str]]:
        """Step and exact loss of every step that any life finished, in the order they were taken."""
        lines = (self.work / LOSSES).read_text().splitlines()
        return [(int(step), loss) for step, loss in (line.split() for line in lines)]


class _Told:
    """Tells the parent, and rests some messages after the one that it is to be killed at: however late that kill is, it
    meets this process where it is meant to."""

    def __init__(self, messages: Connection, moment: str, count: int) -> None:
        self._messages, self._moment, self._left = messages, moment, count
        self._more: int | None = None

    def __call__(self, message: str) -> None:
        self._messages.send(message)
        self._left -= message == self._moment
        if self._more is None and self._left <= 0:
            self._more = _MOST_MORE
        elif self._more is not None:
            self._more -= 1
            if self._more == 0:
                time.sleep(_REST_S)


def live(life: Life, messages: Connection, moment: str, count: int) -> None:
    """Train to the end, and report before and after every step and save. Wait to be killed soon after the report of
    `moment` number `count`."""
    tell = _Told(messages, moment, count)
    lora = LoraSpec(rank=4, dropout=0.2)
    train = TrainSpec(trainable=LORA, lora=lora) if life.lora else TrainSpec()
    layout = open_for_training(life.model, train).layout
    if life.compressed:
        layout = with_compressed_states(layout, smallest=1024)
    template = Template.from_folder(life.model, layout=layout)
    store = HostStore.allocate(template.layout, num_threads=1)
    plan = StepPlan(PreparedDataset.open(life.data), sequence_length=48, tokens_per_step=90, seed=3, epochs=NUM_EPOCHS)
    recipe = Recipe(learning_rate=3e-3, warmup_steps=3, seed=5, adapter_scale=lora.scale, adapter_dropout=lora.dropout)
    device = HostDevice(num_threads=1, max_delay_s=0.001, delay_seed=1)
    saved = [folder for folder in life.checkpoints() if is_complete(folder)]
    adapter = None
    if life.lora:
        saved_as = AdapterConfig(rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, base="model")
        adapter = AdapterExport(config=saved_as, base_sha256=lambda: _DIGEST)
    state = load_checkpoint(store, saved[-1], base=life.model, base_sha256=lambda: _DIGEST) if saved else None
    if state is None:
        load_model(store, life.model)
    trainer = Trainer(template, store, device, recipe, Execution(optimizer_threads=1), num_steps=plan.num_steps)
    if state is not None:
        trainer.restore(state)
    tell("born")
    while trainer.step < plan.num_steps:
        report = trainer.train_step(plan.step(trainer.step))
        with (life.work / LOSSES).open("a") as losses:
            losses.write(f"{report.step} {report.loss.hex()}\n")
        tell("stepped")
        if report.step % SAVE_EVERY == 0 or report.step == plan.num_steps:
            tell("saving")
            target = life.work / CHECKPOINTS / f"step-{report.step:06d}"
            save_checkpoint(store, target, source=life.model, trainer_state=trainer.state(), adapter=adapter)
            tell("saved")
    trainer.close()
    device.close()
    store.close()
    tell("done")

"""Ranks on several nodes, each with a part of the store in memory of its own: the bits of one rank, from a model and
from a checkpoint, and back into a checkpoint. Two nodes are two memories of one machine here, and ranks are threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.plans import settings
from tests.support.ranks import LANES, STEP, in_ranks, numbers_of, rows_of, template_of_rank
from tests.support.tiny_models import Engine, TinyModel

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.divided_store import DividedStore, Division
from horizon_server.engine.ranks import ALONE, Call, Ranks
from horizon_server.engine.trainer import Trainer
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.generations import lent_planes
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model
from horizon_server.store.ownership import Ownership
from horizon_server.store.planes import lent_memory


def life(
    model: TinyModel, folder: Path, rows: Any, *, num_nodes: int, num_ranks: int, resume_from: Path | None, **how: Any
) -> tuple[Any, dict[str, bytes], list[int]]:
    """Load a model or a checkpoint, train, and write a checkpoint: what it says, and the files' bytes. And how much
    memory each node's planes have taken."""
    recipe, execution = settings(lanes=LANES, num_ranks=num_ranks, num_nodes=num_nodes, **STEP, **how)
    layout = model.template.layout
    division = Division(ownership=Ownership(layout=layout, num_ranks=num_ranks), num_nodes=num_nodes)
    templates = [template_of_rank(model, rank) for rank in range(num_ranks)]
    target = folder / f"{num_nodes}-{num_ranks}-{resume_from is None}"

    def one(ranks: Ranks, memories: list[dict[str, int]]) -> Any:
        node, place = divmod(ranks.rank, division.ranks_per_node)
        device = HostDevice(num_threads=1)
        store: HostStore
        if num_nodes == 1:
            store = HostStore.attach(layout, memories[0], max_ranks=LANES)
        else:
            store = DividedStore(
                layout,
                memories[node],
                division=division,
                node=node,
                grad_dtype=torch.float32,
                rank=place,
                max_ranks=LANES,
            )
            store.connect(ranks)
        state = None
        if ranks.leads:
            store.start_loading()
            if resume_from is None:
                load_model(store, folder / "model")
            else:
                state = load_checkpoint(store, resume_from)
            store.start_training(num_ranks)
            ranks.is_alone or ranks.send(Call(name="begin"))
        else:
            while (call := ranks.receive()).name != "begin":
                store.handlers[call.name](call)
        trainer = Trainer(templates[ranks.rank], store, device, recipe, execution, num_steps=10, ranks=ranks)
        if not ranks.leads:
            trainer.follow(store.handlers)
            return None
        if state is not None:
            trainer.restore(state)
        figures = [numbers_of(trainer.train_step(step)) for step in rows]
        save_checkpoint(store, target, source=folder / "model", trainer_state=trainer.state())
        again = numbers_of(trainer.train_step(rows[0]))
        trainer.close()
        device.close()
        return figures, again

    with memory_of(layout, num_nodes) as memories:
        said = (
            one(ALONE, memories)
            if num_ranks == 1
            else in_ranks(num_ranks, lambda r: one(r, memories), gathers=True, num_nodes=num_nodes)
        )
        taken = [sum(os.fstat(fd).st_blocks * 512 for fd in planes.values()) for planes in memories]
    files = {str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()}
    return said, files, taken


@contextmanager
def memory_of(layout: Any, num_nodes: int) -> Iterator[list[dict[str, int]]]:
    planes = lent_planes(layout, grad_dtype_bytes=4, max_ranks=LANES)
    if num_nodes == 1:
        with lent_memory(planes) as one:
            yield [one]
        return
    with lent_memory(planes) as first, lent_memory(planes) as second:
        yield [first, second]


@pytest.mark.parametrize("case", ["qwen3", "llama"])
def test_nodes(case: str, engine: Engine, tmp_path: Path) -> None:
    model, rows = engine.tiny_model(case), rows_of(engine)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(model.config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    one = life(model, tmp_path, rows, num_nodes=1, num_ranks=1, resume_from=None)
    two = life(model, tmp_path, rows, num_nodes=2, num_ranks=4, resume_from=None)
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys()
    assert [n for n in one[1] if one[1][n] != two[1][n]] == []
    print(one[2], two[2])
    resumed_one = life(model, tmp_path, rows, num_nodes=1, num_ranks=1, resume_from=tmp_path / "1-1-True")
    resumed_two = life(model, tmp_path, rows, num_nodes=2, num_ranks=4, resume_from=tmp_path / "2-4-True")
    assert resumed_one[:2] == resumed_two[:2]

"""Ranks on several nodes, each with a part of the store in memory of its own: the bits of one rank, from a model and
from a checkpoint, and back into a checkpoint. Nodes are memories of one machine here, and ranks are threads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.plans import settings
from tests.support.ranks import LANES, STEP, Steps, in_ranks, numbers_of, rows_of, template_of_rank
from tests.support.tiny_models import Engine, TinyModel

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.divided_store import DividedStore, Division
from horizon_server.engine.ranks import ALONE, Call, Ranks
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import TrainSpec
from horizon_server.store import planes
from horizon_server.store.adapter_files import AdapterConfig
from horizon_server.store.base_digest import model_digest
from horizon_server.store.checkpoint import AdapterExport, load_checkpoint, save_checkpoint
from horizon_server.store.checkpoint_parts import Export
from horizon_server.store.exported import ExportDtype
from horizon_server.store.generations import lent_planes
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import PLANE_BYTES, StoreLayout, plane_sizes
from horizon_server.store.model_load import load_model
from horizon_server.store.ownership import Ownership, length
from horizon_server.store.planes import lent_memory

PAGE_BYTES = 4096
Memory = Mapping[str, int]
"""The descriptors of a node's planes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what of it is trained, in which format it is written, and who computes it."""

    model_type: str
    of_model: torch.dtype = torch.bfloat16
    lora: dict[str, Any] | None = None
    dtype: ExportDtype = "source"
    export: Export = "adapter"
    num_nodes: int = 2
    num_ranks: int = 4


CASES = {
    "tied": Case(model_type="qwen3"),
    "untied, in bf16": Case(model_type="llama", of_model=torch.float32, dtype="bf16"),
    "experts, in fp16": Case(model_type="mixtral", dtype="fp16"),
    "three nodes, in fp32": Case(model_type="qwen3", dtype="fp32", num_nodes=3, num_ranks=3),
    "adapters": Case(model_type="llama", lora={"targets": ["q_proj", "down_proj"]}),
    "adapters, merged": Case(model_type="qwen3", of_model=torch.float32, dtype="fp32", export="merged", lora={}),
    "adapters of an nf4 base": Case(model_type="llama", export="both", lora={"base": "nf4"}),
    "dora": Case(model_type="llama", of_model=torch.float32, lora={"dora": True}),
    "dora of an int8 base": Case(model_type="qwen3", lora={"dora": True, "base": "int8"}),
}
"""Every kind of plane, and every format of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model's folder, and how it is trained."""

    case: Case
    folder: Path
    model: TinyModel
    adapter: AdapterExport | None

    @classmethod
    def make(cls, case: Case, engine: Engine, folder: Path, **sizes: Any) -> Job:
        """Write the folder."""
        model = engine.tiny_model(case.model_type, **sizes)
        reference: Any = model.reference()
        reference.to(case.of_model).save_pretrained(folder)
        lora = None if case.lora is None else {"rank": 4, "alpha": 6.0, **case.lora}
        train = TrainSpec.model_validate({} if lora is None else {"trainable": "lora", "lora": lora})
        layout = open_for_training(folder, train).layout
        adapter = None
        if lora is not None:
            config = AdapterConfig(rank=4, alpha=6.0, dora=train.lora.dora, base="tiny")
            adapter = AdapterExport(config=config, base_sha256=lambda: model_digest(folder), export=case.export)
        template = Template.from_folder(folder, layout=layout)
        return cls(case=case, folder=folder, model=dataclasses.replace(model, template=template), adapter=adapter)

    @property
    def layout(self) -> StoreLayout:
        """Of its store."""
        return self.model.template.layout

    def load(self, store: HostStore, checkpoint: Path | None) -> dict[str, Any] | None:
        """As a worker does; the trainer's state, where a checkpoint has one."""
        store.start_loading()
        if checkpoint is None:
            load_model(store, self.folder)
            return None
        digest = None if self.adapter is None else self.adapter.base_sha256
        return load_checkpoint(store, checkpoint, base=self.folder, base_sha256=digest)

    def save(self, store: HostStore, target: Path, state: dict[str, Any]) -> Path:
        """As a worker does."""
        how: dict[str, Any] = {"dtype": self.case.dtype, "adapter": self.adapter}
        save_checkpoint(store, target, source=self.folder, trainer_state=state, **how)
        return target


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Nodes with as many ranks each, and memory of their own."""

    num_nodes: int
    num_ranks: int

    def division(self, layout: StoreLayout) -> Division:
        """What each has of a store."""
        return Division(ownership=Ownership(layout=layout, num_ranks=self.num_ranks), num_nodes=self.num_nodes)

    @contextmanager
    def memories(self, layout: StoreLayout) -> Iterator[list[Memory]]:
        """One for each node."""
        sizes = lent_planes(layout, grad_dtype_bytes=4, max_ranks=LANES)
        with ExitStack() as lent:
            yield [lent.enter_context(lent_memory(sizes)) for _ in range(self.num_nodes)]

    def attach(self, layout: StoreLayout, memories: Sequence[Memory], ranks: Ranks) -> HostStore:
        """The store of one rank."""
        if self.num_nodes == 1:
            return HostStore.attach(layout, memories[0], max_ranks=LANES)
        division = self.division(layout)
        node, place = divmod(ranks.rank, division.ranks_per_node)
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
        return store

    def run(self, work: Callable[[Ranks], Any]) -> Any:
        """What the first rank returns."""
        if self.num_ranks == 1:
            return work(ALONE)
        return in_ranks(self.num_ranks, work, gathers=True, num_nodes=self.num_nodes)


ONE = Fleet(num_nodes=1, num_ranks=1)


def answer_until_begin(ranks: Ranks, store: HostStore) -> None:
    assert isinstance(store, DividedStore)
    while (call := ranks.receive()).name != "begin":
        store.handlers[call.name](call)


@dataclass(frozen=True, kw_only=True)
class Life:
    """What a job says in some steps, the checkpoint after them, and what it says in one step more."""

    said: list[Any]
    checkpoint: Path
    after: tuple[Any, ...]

    @property
    def files(self) -> dict[str, bytes]:
        """Of the checkpoint, by name."""
        found = (file for file in self.checkpoint.rglob("*") if file.is_file())
        return {str(file.relative_to(self.checkpoint)): file.read_bytes() for file in found}


def life(job: Job, fleet: Fleet, steps: Steps, target: Path, *, resume_from: Path | None = None) -> Life:
    """Load the model or a checkpoint, train, and write a checkpoint before the last step."""
    recipe, execution = settings(
        lanes=LANES,
        num_ranks=fleet.num_ranks,
        num_nodes=fleet.num_nodes,
        adapter_scale=1.0 if job.adapter is None else job.adapter.config.scale,
        **STEP,
    )
    templates = [template_of_rank(job.model, rank) for rank in range(fleet.num_ranks)]

    def work(ranks: Ranks) -> Life | None:
        store, state = fleet.attach(job.layout, memories, ranks), None
        if ranks.leads:
            state = job.load(store, resume_from)
            store.start_training(fleet.num_ranks)
            if not ranks.is_alone:
                ranks.send(Call(name="begin"))
        else:
            answer_until_begin(ranks, store)
        device = HostDevice(num_threads=1)
        try:
            trainer = Trainer(templates[ranks.rank], store, device, recipe, execution, num_steps=10, ranks=ranks)
            if isinstance(store, DividedStore) and not ranks.leads:
                trainer.follow(store.handlers)
                return None
            if state is not None:
                trainer.restore(state)
            said = [numbers_of(trainer.train_step(step)) for step in steps[:-1]]
            job.save(store, target, trainer.state())
            after = numbers_of(trainer.train_step(steps[-1]))
            trainer.close()
            return Life(said=said, checkpoint=target, after=after)
        finally:
            device.close()

    with fleet.memories(job.layout) as memories:
        found = fleet.run(work)
    assert isinstance(found, Life)
    return found


@pytest.mark.parametrize("name", CASES)
def test_nodes_give_the_bits_of_one_rank_and_continue_what_others_have_begun(
    name: str, engine: Engine, tmp_path: Path
) -> None:
    case = CASES[name]
    job, steps = Job.make(case, engine, tmp_path / "model"), rows_of(engine)
    several = Fleet(num_nodes=case.num_nodes, num_ranks=case.num_ranks)
    alone, together = (life(job, fleet, steps, tmp_path / str(fleet.num_nodes)) for fleet in (ONE, several))
    assert (together.said, together.after) == (alone.said, alone.after)
    assert together.files == alone.files

    resumed, last = [], [steps[-1]] * 2
    for fleet, before in ((ONE, together), (several, alone)):
        target = tmp_path / f"resumed on {fleet.num_nodes}"
        resumed.append(life(job, fleet, last, target, resume_from=before.checkpoint))
    for one in resumed:
        assert one.said == [alone.after]
    assert resumed[0].files == resumed[1].files
    assert resumed[0].files != alone.files


def taken(memories: Sequence[Memory]) -> list[dict[str, int]]:
    """Bytes of each node's planes that have memory."""
    return [{plane: 512 * os.fstat(fd).st_blocks for plane, fd in memory.items()} for memory in memories]


@pytest.mark.parametrize("lora", [None, {"base": "int8"}])
def test_each_node_has_memory_for_its_part_alone(
    lora: dict[str, Any] | None, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the kernel gives memory files huge pages, an edge is large.
    monkeypatch.setattr(planes, "advise_huge_pages", lambda mapping: None)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
    job = Job.make(Case(model_type="llama", lora=lora), engine, tmp_path / "model", **sizes)
    fleet, found = Fleet(num_nodes=2, num_ranks=2), dict[str, list[dict[str, int]]]()

    def work(ranks: Ranks) -> None:
        store = fleet.attach(job.layout, memories, ranks)
        # All are there before anything is loaded.
        ranks.meet()
        if not ranks.leads:
            answer_until_begin(ranks, store)
            return
        found["empty"] = taken(memories)
        job.load(store, None)
        found["loaded"] = taken(memories)
        job.save(store, tmp_path / "checkpoint", {})
        found["saved"] = taken(memories)
        job.load(store, tmp_path / "checkpoint")
        found["loaded again"] = taken(memories)
        ranks.send(Call(name="begin"))

    with fleet.memories(job.layout) as memories:
        fleet.run(work)
    division = fleet.division(job.layout)
    edges = 2 * PAGE_BYTES * len(list(job.layout.tensors()))
    for plane, size_bytes in plane_sizes(job.layout, grad_dtype_bytes=4).items():
        whole = plane == "packed"
        num_elements = sum(unit.elements_in(plane) for unit in job.layout.units)
        element_bytes = 1 if whole else PLANE_BYTES.get(plane, 4)
        for node in range(2):
            parts = [slice(0, num_elements)] if whole else division.held(plane, node)
            own = element_bytes * sum(map(length, parts))
            assert abs(own - size_bytes / (1 if whole else 2)) < 0.2 * size_bytes, (plane, node)
            for when, by_node in found.items():
                # Of what belongs to others, the first node keeps no more than the pages at both ends of a tensor.
                more = edges if node == 0 and when != "empty" and not whole else 0
                assert own <= by_node[node][plane] <= own + more, (plane, node, when)

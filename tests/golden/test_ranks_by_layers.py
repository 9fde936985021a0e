"""Ranks that divide a step by layers give the bits of one rank, and of ranks that divide it by rows; these are threads
with a device each."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.golden.test_lora import adapted
from tests.golden.test_ranks import pairs, weighted
from tests.golden.test_trainable import frozen_but
from tests.support.plans import ledger_of
from tests.support.ranks import LANES, STEP, SharedStore, numbers_of, results, rows_of, trained, whole_life
from tests.support.tiny_models import Engine

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.protocol import Queue
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.ranks import Ranks
from horizon_server.engine.trainer import Trainer
from horizon_server.figures import StepFigures
from horizon_server.planning.model_folder import ModelShape
from horizon_server.records.execution import Parallel

if TYPE_CHECKING:
    from tests.support.tiny_models import TinyModel


def by_layers(model: TinyModel, rows: Sequence[Sequence[MicroBatch]], ranks: Sequence[int], **how: Any) -> list[Any]:
    """What one rank gives, and then what these numbers of ranks give."""
    (alone,) = results(model, whole_life(rows), ranks=(1,), **how)
    return [alone, *results(model, whole_life(rows), ranks=ranks, parallel="layers", **how)]


@pytest.mark.parametrize(
    ("model_type", "changes", "ranks"),
    [
        ("qwen3", {}, (2, 3)),
        ("llama", {"num_hidden_layers": 5}, (2, 4)),
        ("gpt2", {}, (2,)),
        ("mixtral", {}, (3,)),
        ("gemma3_text", {}, (2,)),
    ],
)
def test_any_number_of_ranks_gives_the_same_bits(
    engine: Engine, model_type: str, changes: dict[str, Any], ranks: tuple[int, ...]
) -> None:
    """A tied table, one of its own, learned positions next to it, experts that some lanes do not reach, layers of two
    kinds."""
    model = engine.tiny_model(model_type, **changes)
    first, *others = by_layers(model, rows_of(engine), ranks, max_grad_norm=0.5)
    assert others == [first] * len(ranks)


@pytest.mark.parametrize(
    ("model_type", "layer_ranks"),
    [
        # Two to one, as the plan deals it; the slow one first; one rank after the other.
        ("qwen3", (0, 1, 0, 0, 1, 0)),
        ("llama", (1, 0, 0)),
        ("gpt2", (0, 0, 1, 1)),
        ("gemma3_text", (1, 1, 0)),
        # Two to one to one, and a rank with a single layer in the middle of another's.
        ("qwen3", (0, 1, 2, 0, 0, 1, 2, 0)),
        ("mixtral", (2, 0, 1, 2)),
    ],
)
def test_any_deal_gives_the_same_bits(engine: Engine, model_type: str, layer_ranks: tuple[int, ...]) -> None:
    model, num_ranks = engine.tiny_model(model_type, num_hidden_layers=len(layer_ranks)), max(layer_ranks) + 1
    first, *others = by_layers(model, rows_of(engine), (num_ranks,), max_grad_norm=0.5, layer_ranks=layer_ranks)
    assert others == [first]


@pytest.mark.parametrize("layer_ranks", [(0, 0, 1, 0), (1, 1, 0, 0), (0, 2, 2, 1)])
@pytest.mark.parametrize("case", ["frozen below", "long", "races", "gpu"])
def test_so_does_any_deal_where_ranks_have_no_part_or_run_apart(
    case: str, layer_ranks: tuple[int, ...], engine: Engine
) -> None:
    model, how = engine.tiny_model("llama", num_hidden_layers=4), dict[str, Any]()
    rows = rows_of(engine, num_steps=2)
    match case:
        case "frozen below":
            # The first two layers have no backward, and hand their outputs on in one place.
            model = frozen(model, r"layers\.[23]\.")
        case "long":
            rows = [[engine.pack(engine.documents(60, seed=step))] for step in range(2)]
        case "races":
            how = {
                "make_device": lambda rank: HostDevice(
                    num_threads=1, max_delay_s=0.001, delay_seed=rank, poison_on_free=True
                )
            }
        case "gpu":
            how = {
                "compute_dtype": "bfloat16",
                "grad_dtype": torch.bfloat16,
                "make_device": lambda _: CudaDevice(runtime=CpuRuntime(), poison_on_free=True),
            }
    first, *others = by_layers(model, rows, (max(layer_ranks) + 1,), layer_ranks=layer_ranks, **how)
    assert others == [first]


@pytest.mark.parametrize(
    "case", ["adapters", "bfloat16", "one row at a time", "long", "no clipping", "frozen below", "head alone", "races"]
)
def test_so_does_whatever_else_decides_how_a_step_is_computed(case: str, engine: Engine, tmp_path: Path) -> None:
    model, how, ranks = engine.tiny_model("llama"), dict[str, Any](), (2, 3)
    rows = rows_of(engine, num_steps=2)
    match case:
        case "adapters":
            model = adapted(model, tmp_path)
            how = {"adapter_scale": 1.5}
        case "bfloat16":
            how = {
                "compute_dtype": "bfloat16",
                "grad_dtype": torch.bfloat16,
                "make_device": lambda _: HostDevice(num_threads=1, compute_dtype=torch.bfloat16),
            }
        case "one row at a time":
            how = {"micro_batch_tokens": 0}
        case "long":
            # One document: most lanes, and with them the head of a rank, have nothing to compute.
            rows = [[engine.pack(engine.documents(60, seed=step))] for step in range(2)]
        case "no clipping":
            how = {"max_grad_norm": None}
        case "frozen below":
            # Backward ends in the last layer but one: one of three ranks has no part in it.
            model = frozen(model, r"layers\.[12]\.")
        case "head alone":
            model = frozen(model, r"lm_head")
        case "races":
            how = {
                "make_device": lambda rank: HostDevice(
                    num_threads=1, max_delay_s=0.001, delay_seed=rank, poison_on_free=True
                )
            }
    first, *others = by_layers(model, rows, ranks, **how)
    assert others == [first] * len(ranks)


def frozen(model: TinyModel, expression: str) -> TinyModel:
    found = frozen_but(model, expression)
    assert found is not None
    return found


def test_a_gpu_s_queues_hand_hidden_states_on_as_the_host_s_do(engine: Engine) -> None:
    def device(_: int) -> Any:
        return CudaDevice(runtime=CpuRuntime(), poison_on_free=True)

    how = {"compute_dtype": "bfloat16", "grad_dtype": torch.bfloat16, "make_device": device}
    first, *others = by_layers(engine.tiny_model("qwen3"), rows_of(engine), (2,), **how)
    assert others == [first]


@pytest.mark.parametrize("objective", [pairs, weighted])
def test_objectives_are_asked_about_the_tokens_of_all_ranks(engine: Engine, objective: Any) -> None:
    rows = [[*step, engine.pack(engine.documents(6, 5))] for step in rows_of(engine)]

    def work(trainer: Trainer) -> list[Any]:
        return [numbers_of(trainer.train_step(step, objective(step))) for step in rows]

    model = engine.tiny_model("qwen3")
    found = results(model, work, ranks=(1,)) + results(model, work, ranks=(2, 3), parallel="layers")
    assert found == [found[0]] * 3


def test_rows_and_deals_of_layers_take_turns_with_the_same_bits(engine: Engine) -> None:
    """Also from a state in the middle, and after the memory of the devices was given back."""
    model, rows = engine.tiny_model("llama"), rows_of(engine, num_steps=5)
    whole, changing = SharedStore(model), SharedStore(model)
    trained(whole, whole_life(rows), num_ranks=1, lanes=LANES, **STEP)
    state: dict[str, Any] = {}
    turns: list[tuple[int, Parallel, tuple[int, ...]]] = [
        (2, "layers", ()),
        (4, "rows", ()),
        (3, "layers", ()),
        (2, "layers", (1, 1, 0)),
        (1, "rows", ()),
    ]
    for number, (num_ranks, parallel, layer_ranks) in enumerate(turns):

        def work(trainer: Trainer, step: Sequence[MicroBatch] = rows[number]) -> bool:
            nonlocal state
            if state:
                trainer.restore(state)
            trainer.release_device()
            trainer.train_step(step)
            state = trainer.state()
            return True

        how: dict[str, Any] = {"parallel": parallel, "layer_ranks": layer_ranks, **STEP}
        trained(changing, work, num_ranks=num_ranks, lanes=LANES, **how)
    assert changing.bits() == whole.bits()


def test_a_step_that_is_larger_than_planned_has_room(engine: Engine) -> None:
    model = engine.tiny_model("llama")
    rows = [[engine.pack(engine.documents(*[8] * number))] for number in (6, 12, 40)]
    first, *others = by_layers(model, rows, (2,), tokens_per_step=48)
    assert others == [first]


def test_a_failure_of_one_rank_ends_what_the_others_wait_for(engine: Engine) -> None:
    model = engine.tiny_model("llama")

    failed = threading.Event()

    class Broken(HostDevice):
        def __init__(self, rank: int) -> None:
            super().__init__(num_threads=1)
            if rank == 1:
                self.compute.submit = self._fail  # type: ignore[method-assign]

        def _fail(self, *args: Any, **kwargs: Any) -> None:
            failed.set()
            raise RuntimeError("this rank's device is broken")

    def work(trainer: Trainer) -> StepFigures:
        # As the threads that watch the other processes do.
        def watch() -> None:
            failed.wait(240)
            trainer._ranks.is_broken = True

        threading.Thread(target=watch, daemon=True).start()
        return trainer.train_step(rows_of(engine, num_steps=1)[0])

    with pytest.raises(RuntimeError, match=r"another rank has died|this rank's device is broken"):
        trained(SharedStore(model), work, num_ranks=2, lanes=LANES, parallel="layers", make_device=Broken, **STEP)


class FailingHop(HostDevice):
    """Fails at the copy of a hidden state to other ranks that is `fail_at` from now, once its other queues had time."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.num_hops, self.fail_at = 0, 0

    def download(self, *args: Any, queue: Queue | None = None, **kwargs: Any) -> None:
        self.num_hops += queue is not None
        if queue is not None and self.num_hops == self.fail_at:
            queue.submit(self._fail)
        else:
            super().download(*args, queue=queue, **kwargs)

    def _fail(self) -> None:
        time.sleep(0.5)
        raise RuntimeError("this copy failed")


@pytest.mark.parametrize(("call", "last_of"), [("evaluate",) * 2, ("train_step", "evaluate"), ("train_step",) * 2])
def test_a_failed_copy_to_other_ranks_ends_the_rank_at_once(call: str, last_of: str, engine: Engine) -> None:
    """The last copy of a forward or of a whole step, for which the others wait before they come to an exchange."""
    rows, all_ranks = rows_of(engine, num_steps=1)[0], list[Ranks]()
    first = FailingHop()

    class Noted(Ranks):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            all_ranks.append(self)

    ended_by_itself = []

    def work(trainer: Trainer) -> None:
        # Before the copies are counted: the trial of packing has some of its own.
        assert trainer.supports_packing
        first.num_hops = 0
        getattr(trainer, last_of)(rows)
        first.num_hops, first.fail_at = 0, first.num_hops
        try:
            with pytest.raises(RuntimeError, match="this copy failed"):
                getattr(trainer, call)(rows)
            # Before it hears that another one has ended.
            ended_by_itself.append(not any(ranks.is_broken for ranks in all_ranks))
        finally:
            # As the end of the first rank's process does.
            for ranks in all_ranks:
                ranks.is_broken = True
        trainer.flush()

    def device(rank: int) -> HostDevice:
        return first if rank == 0 else HostDevice(num_threads=1)

    how: dict[str, Any] = {"num_ranks": 2, "lanes": LANES, "parallel": "layers", **STEP}
    with pytest.raises(RuntimeError, match=r"another rank has died|this copy failed"):
        trained(SharedStore(engine.tiny_model("llama")), work, make_device=device, kind=Noted, **how)
    assert ended_by_itself == [True]


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize(("num_ranks", "layer_ranks"), [(2, ()), (3, ()), (2, (0, 0, 1))])
def test_the_plan_knows_the_memory(
    model_type: str, num_ranks: int, layer_ranks: tuple[int, ...], engine: Engine
) -> None:
    model, rows = engine.tiny_model(model_type), rows_of(engine, num_steps=1)

    def work(trainer: Trainer) -> StepFigures:
        trainer.train_step(rows[0])
        return trainer.train_step(rows[0])

    how: dict[str, Any] = {"parallel": "layers", "layer_ranks": layer_ranks, **STEP}
    found = trained(SharedStore(model), work, num_ranks=num_ranks, lanes=LANES, **how)
    planned = ledger_of(
        model.template.layout,
        ModelShape.from_config(model.config.to_dict()),
        num_ranks=num_ranks,
        lanes=LANES,
        longest_document=21,
        sequence_length=21,
        **how,
    )
    assert found.device_memory_bytes["gradients"] == planned.device_bytes["gradients"]
    assert found.device_memory_bytes["activations"] == planned.device_bytes["activations"]
    assert found.device_memory_bytes["weights"] <= planned.device_bytes["weights"]
    # On the host a device's memory is the host's, and the counters are on a page of their own.
    on_devices = {part: num_ranks * planned.device_bytes[part] for part in ("weights", "gradients", "activations")}
    assert (
        found.host_memory_bytes["activations"] == planned.host_bytes["activations"] - on_devices["activations"] - 4096
    )
    staging = planned.host_bytes["staging"] - on_devices["weights"] - on_devices["gradients"]
    assert found.host_memory_bytes["staging"] == staging

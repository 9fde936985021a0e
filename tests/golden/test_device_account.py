"""What the device holds and what crosses its link: bounded whatever the depth, counted to the byte, refused with
numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from tests.support.plans import ledger_of
from torch import Tensor

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.errors import DoesNotFit
from horizon_server.figures import StepFigures
from horizon_server.planning.model_folder import ModelShape
from horizon_server.records.execution import ActivationPlacement

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

# Of a few, one shows what a busy machine hides in another.
MOST_STEPS = 20
Pack = Callable[[list[Tensor]], MicroBatch]


def test_only_the_layer_inputs_grow_with_depth(engine: Engine) -> None:
    rows = [engine.pack(engine.documents(40, 30)), engine.pack(engine.documents(31))]
    peaks = {}
    for depth in (2, 8):
        run = engine.start(engine.tiny_model("llama", num_hidden_layers=depth))
        run.trainer.train_step(rows)
        peaks[depth] = run.trainer.train_step(rows).device_memory_bytes

    for component in ("weights", "gradients", "workspace"):
        assert peaks[8][component] == peaks[2][component] > 0
    num_tokens, hidden_size, fp32_bytes = 101, 32, 4
    assert peaks[8]["activations"] == (8 + 2) * num_tokens * hidden_size * fp32_bytes
    assert peaks[2]["activations"] == (2 + 2) * num_tokens * hidden_size * fp32_bytes


def test_nothing_on_the_device_grows_with_depth_when_inputs_are_offloaded(engine: Engine) -> None:
    rows = [engine.pack(engine.documents(40, 30)), engine.pack(engine.documents(31))]
    reports = {}
    for depth in (2, 8):
        run = engine.start(engine.tiny_model("llama", num_hidden_layers=depth), activation_placement="host")
        run.trainer.train_step(rows)
        reports[depth] = run.trainer.train_step(rows)

    assert reports[8].device_memory_bytes == reports[2].device_memory_bytes
    num_tokens, hidden_size, fp32_bytes = 101, 32, 4
    assert reports[8].device_memory_bytes["activations"] == 3 * num_tokens * hidden_size * fp32_bytes
    assert reports[8].host_memory_bytes["activations"] == 7 * reports[2].host_memory_bytes["activations"]
    # Seven of eight inputs go down and come up again; the last is still there.
    for direction in ("h2d", "d2h"):
        grown = getattr(reports[8], direction).bytes - getattr(reports[2], direction).bytes
        layers = grown - 6 * num_tokens * hidden_size * fp32_bytes
        assert layers % (6 * fp32_bytes) == 0 and layers > 0


def test_a_single_layer_has_nothing_to_offload(engine: Engine) -> None:
    model, rows = (
        engine.tiny_model("llama", num_hidden_layers=1),
        [engine.pack(engine.documents(20)), engine.pack(engine.documents(9))],
    )
    kept, offloaded = engine.start(model), engine.start(model, activation_placement="host")

    one, other = kept.trainer.train_step(rows), offloaded.trainer.train_step(rows)

    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert one.h2d.bytes == other.h2d.bytes


def test_a_step_beyond_the_limit_is_refused_with_numbers_and_the_run_goes_on(engine: Engine) -> None:
    model = engine.tiny_model("llama")
    small, large = [engine.pack(engine.documents(16))], [engine.pack(engine.documents(100)) for _ in range(20)]
    unlimited = engine.start(model)
    unlimited.trainer.train_step(small)
    run = engine.start(model, device=HostDevice(num_threads=1, limit_bytes=unlimited.device.arena.peak_total_bytes))
    run.trainer.train_step(small)

    with pytest.raises(DoesNotFit, match=r"activations needs 1,280,000 bytes more, but .* of the limit of"):
        run.trainer.train_step(large)

    assert run.trainer.step == 1
    assert run.trainer.train_step(small).skipped == ""


def test_a_workspace_beyond_the_limit_fails_the_step(engine: Engine) -> None:
    model = engine.tiny_model("llama")
    rows = [engine.pack(engine.documents(100))]
    unlimited = engine.start(model)
    unlimited.trainer.train_step(rows)
    run = engine.start(model, device=HostDevice(num_threads=1, limit_bytes=unlimited.device.arena.peak_total_bytes - 1))

    with pytest.raises(DoesNotFit, match="workspace needs"):
        run.trainer.train_step(rows)


def test_closing_gives_everything_back(engine: Engine) -> None:
    run = engine.start(engine.tiny_model("qwen3"))
    run.trainer.train_step([engine.pack(engine.documents(20, 12))])

    run.trainer.close()

    assert run.device.arena.held_bytes() == {"weights": 0, "gradients": 0, "activations": 0, "workspace": 0}


def test_weights_cross_twice_and_gradients_once(engine: Engine) -> None:
    model = engine.tiny_model("llama")
    (document,) = engine.documents(24)
    run = engine.start(model)

    report = run.trainer.train_step([engine.pack([document])])

    units, fp32_bytes = model.template.layout.units, 4
    layers = sum(unit.num_elements for unit in units[1:-1])
    rows = torch.unique(document).numel() * 32
    last_two = sum(unit.num_elements for unit in units[-3:-1])
    assert report.h2d.bytes == (2 * layers - last_two + units[-1].num_elements + 2 * rows) * fp32_bytes
    assert report.d2h.bytes == (layers + units[-1].num_elements + rows) * fp32_bytes


def test_a_slow_link_shows_as_exposed_seconds_and_a_fast_one_does_not(engine: Engine) -> None:
    model, rows = engine.tiny_model("llama"), [engine.pack(engine.documents(40, 30))]
    on_a_slow_link = engine.start(model, device=HostDevice(num_threads=1, link_bytes_per_s=2e5)).trainer
    at_once = engine.start(model).trainer
    fast = [at_once.train_step(rows) for _ in range(3)]
    slow = [on_a_slow_link.train_step(rows) for _ in range(3)]
    # Where the machine does something else meanwhile, a step computes longer than its copies take, or waits for one
    # longer than the link makes it. Not in every step.
    while len(slow) < MOST_STEPS and not shows_a_slow_link(slow, fast):
        fast.append(at_once.train_step(rows))
        slow.append(on_a_slow_link.train_step(rows))

    for step in slow:
        assert step.h2d.busy_s >= step.h2d.bytes / 2e5
        # Copies are hidden by compute or by the other direction, and by nothing else.
        assert step.h2d.exposed_s >= 0.9 * (step.h2d.busy_s - step.compute_s - step.d2h.exposed_s)
    assert shows_a_slow_link(slow, fast), (slow, fast)


def shows_a_slow_link(slow: list[StepFigures], fast: list[StepFigures]) -> bool:
    return (
        min(step.compute_s + step.d2h.exposed_s - step.h2d.busy_s for step in slow) < 0
        and min(step.overlap_ratio for step in slow) < 0.9
        and min(step.h2d.exposed_s for step in fast) < max(step.h2d.exposed_s for step in slow)
    )


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("grad_bytes", [4, 0])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_the_ledger_knows_what_device_and_host_will_hold(
    architecture: str,
    grad_bytes: int,
    placement: ActivationPlacement,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    rows = [engine.pack(engine.documents(60, 50)), engine.pack(engine.documents(100, 10))]
    plan = ledger_of(
        model.template.layout,
        ModelShape.from_config(model.config.to_dict(), names=model.weights),
        tokens_per_step=220,
        sequence_length=110,
        device_kind="host",
        grad_bytes=grad_bytes,
        activation_placement=placement,
    )
    store = model.store(grad_dtype=torch.float32 if grad_bytes else None)
    run = engine.start(
        model,
        store=store,
        activation_placement=placement,
        tokens_per_step=220,
        max_grad_norm=1.0 if grad_bytes else None,
    )

    report = run.trainer.train_step(rows)

    held, on_host = report.device_memory_bytes, report.host_memory_bytes
    for component in ("weights", "gradients", "activations"):
        assert held[component] == plan.device_bytes[component]
    assert held["workspace"] == pytest.approx(plan.device_bytes["workspace"], rel=0.1)
    for component in ("weights", "moments", "gradients"):
        assert on_host[component] == plan.host_bytes[component]
    assert on_host.get("activations", 0) == plan.host_bytes["activations"] - plan.device_bytes["activations"]
    assert (
        on_host["staging"] == plan.host_bytes["staging"] - plan.device_bytes["weights"] - plan.device_bytes["gradients"]
    )


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mixtral", {"intermediate_size": 256}),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 4}),
        ("qwen3_moe", {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 4}),
        ("qwen3_moe", {"moe_intermediate_size": 16, "num_experts": 16, "num_experts_per_tok": 1}),
        ("deepseek_v3", {"n_routed_experts": 16, "n_shared_experts": 2}),
    ],
)
def test_the_ledger_knows_what_experts_keep_whatever_their_number_and_size(
    architecture: str,
    changes: dict[str, int],
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture, hidden_size=64, **changes)
    plan = ledger_of(
        model.template.layout,
        ModelShape.from_config(model.config.to_dict(), names=model.weights),
        tokens_per_step=220,
        sequence_length=110,
        device_kind="host",
        grad_bytes=4,
    )

    report = engine.start(model).trainer.train_step(
        [engine.pack(engine.documents(60, 50)), engine.pack(engine.documents(100, 10))]
    )

    assert report.device_memory_bytes["workspace"] == pytest.approx(plan.device_bytes["workspace"], rel=0.1)

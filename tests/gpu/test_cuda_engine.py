"""The golden tests on a real CUDA device: right numbers within bf16, equal bits whatever the timing, pinned and bounded
memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.device_steps import with_lora
from tests.support.plans import ledger_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from horizon_server.engine.device import device_for
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.cuda_runtime import TorchCuda
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.errors import DoesNotFit
from horizon_server.planning.model_folder import ModelShape
from horizon_server.records.execution import ActivationPlacement
from horizon_server.store.layout import Packing

if TYPE_CHECKING:
    from tests.support.tiny_models import Run, TinyModel

pytestmark = pytest.mark.gpu
Pack = Callable[[list[Tensor]], MicroBatch]
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
DELAYS: dict[str, Any] = {"max_delay_s": 0.002, "poison_on_free": True}
THREE_SLOTS = {"num_weight_slots": 3, "num_gradient_slots": 3}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "again": ({}, {}),
    "delays, poison and three slots": (DELAYS, THREE_SLOTS),
    "delays, poison and one slot": (DELAYS, {"num_weight_slots": 1, "num_gradient_slots": 1}),
    "offloaded inputs, delays and poison": (DELAYS, {"activation_placement": "host"}),
    "resident weights, delays and poison": (DELAYS, {"resident_layers": 3}),
    "resident head, delays and poison": (DELAYS, {"resident_head": True, "resident_layers": 1}),
}


class Unpinnable(TorchCuda):
    """A driver that registers nothing."""

    def register(self, address: int, num_bytes: int) -> int:
        return 2


@pytest.fixture
def three_steps(
    tiny_model: Callable[..., TinyModel], start: Callable[..., Run], documents: Callable[..., list[Tensor]], pack: Pack
) -> Callable[..., tuple[list[float], dict[str, Tensor]]]:
    """Runs three steps of a five-layer model; returns losses with norms, and every plane."""

    def run_them(
        architecture: str,
        device: CudaDevice,
        *,
        grad_dtype: torch.dtype | None = torch.bfloat16,
        release: bool = False,
        **options: Any,
    ) -> tuple[list[float], dict[str, Tensor]]:
        model = tiny_model(architecture, num_hidden_layers=5, layer_types=None)
        store = model.store(grad_dtype=grad_dtype)
        run = start(model, store=store, device=device, **options)
        numbers = []
        for step in range(3):
            rows = [pack(documents(12, 7, seed=step)), pack(documents(21, seed=step + 50))]
            report = run.trainer.train_step(rows)
            assert report.skipped == ""
            numbers += [report.loss, report.grad_norm]
            if release:
                held_bytes, allocated_bytes = sum(device.arena.held_bytes().values()), torch.cuda.memory_allocated()
                run.trainer.release_device()
                assert not any(device.arena.held_bytes().values())
                assert torch.cuda.memory_allocated() <= allocated_bytes - held_bytes
        run.trainer.flush()
        planes = {plane: store.plane(plane).clone() for plane in PLANES}
        run.trainer.close()
        return numbers, planes

    return run_them


def assert_same(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> None:
    assert one[0] == other[0]
    for plane in PLANES:
        assert torch.equal(one[1][plane], other[1][plane]), f"plane {plane} differs"


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen2", "gemma2", "phi3"])
def test_gradients_are_those_of_autograd_within_bf16(
    architecture: str,
    make_device: Callable[..., CudaDevice],
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
    plain_loss: Callable[..., Tensor],
) -> None:
    model = tiny_model(architecture)
    rows = [pack(documents(14, 22)), pack(documents(25, seed=3))]
    run = start(model, store=model.store(grad_dtype=torch.bfloat16), device=make_device())

    report = run.trainer.train_step(rows)

    reference = model.reference()
    num_targets = sum(row.num_targets for row in rows)
    losses = [plain_loss(reference, row) / num_targets for row in rows]
    for loss in losses:
        torch.autograd.backward(loss)
    assert report.loss == pytest.approx(sum(loss.item() for loss in losses), rel=5e-3)
    squares, error = 0.0, 0.0
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        squares += float(parameter.grad.square().sum())
        error += float((run.gradient(name).float() - parameter.grad).square().sum())
    assert report.grad_norm == pytest.approx(squares**0.5, rel=2e-2)
    assert (error / squares) ** 0.5 <= 5e-2


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_streams_and_timing_do_not_change_a_bit(
    architecture: str,
    variant: str,
    make_device: Callable[..., CudaDevice],
    three_steps: Callable[..., tuple[list[float], dict[str, Tensor]]],
) -> None:
    switches, options = VARIANTS[variant]
    assert_same(three_steps(architecture, make_device()), three_steps(architecture, make_device(**switches), **options))


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_packed_weights_that_stay_have_the_bits_of_those_that_come_up_each_time(
    base: Packing,
    make_device: Callable[..., CudaDevice],
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
) -> None:
    model, rows, found = with_lora(tiny_model("llama"), base), [pack(documents(12, 7)), pack(documents(21))], []
    stays = {"packed_layers": 3, "resident_head": True, "resident_table": True}
    for switches, options in (({}, {}), (DELAYS, stays), (DELAYS, {"packed_layers": 2, "resident_layers": 1})):
        store = model.store(grad_dtype=torch.bfloat16)
        run = start(model, store=store, device=make_device(**switches), **options)
        numbers = [run.trainer.train_step(rows).loss for _ in range(3)]
        run.trainer.flush()
        found.append((numbers, {plane: store.plane(plane).clone() for plane in PLANES}))
        run.trainer.close()
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.parametrize(
    "options", [{}, {"resident_layers": 3}, {"activation_placement": "host", "tokens_per_step": 64}]
)
def test_memory_that_is_freed_between_steps_does_not_change_a_bit(
    options: dict[str, Any],
    make_device: Callable[..., CudaDevice],
    three_steps: Callable[..., tuple[list[float], dict[str, Tensor]]],
) -> None:
    kept = three_steps("qwen3", make_device(), **options)
    assert_same(kept, three_steps("qwen3", make_device(**DELAYS), release=True, **options))


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_updating_in_backward_gives_the_bits_of_the_deferred_update(
    architecture: str,
    make_device: Callable[..., CudaDevice],
    three_steps: Callable[..., tuple[list[float], dict[str, Tensor]]],
) -> None:
    deferred = three_steps(architecture, make_device(), max_grad_norm=None)
    assert_same(deferred, three_steps(architecture, make_device(**DELAYS), grad_dtype=None, max_grad_norm=None))


def test_what_cannot_be_pinned_takes_a_detour_to_the_same_bits(
    make_device: Callable[..., CudaDevice], three_steps: Callable[..., tuple[list[float], dict[str, Tensor]]]
) -> None:
    device = make_device(runtime=Unpinnable(), staging_bytes=4096, **DELAYS)
    assert_same(three_steps("llama", make_device()), three_steps("llama", device, activation_placement="host"))
    assert device.refusals


def test_twenty_steps_learn_what_the_host_device_learns(
    tiny_model: Callable[..., TinyModel], start: Callable[..., Run], documents: Callable[..., list[Tensor]], pack: Pack
) -> None:
    model = tiny_model("qwen3")
    losses = []
    for kind, grad_dtype in (("host", torch.float32), ("cuda", torch.bfloat16)):
        device = device_for(kind, num_threads=1)  # type: ignore[arg-type]
        run = start(model, store=model.store(grad_dtype=grad_dtype), device=device, learning_rate=3e-3)
        rows = [pack(documents(11, 20)), pack(documents(16, 9, seed=1))]
        losses.append([run.trainer.train_step(rows).loss for _ in range(20)])

    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1][-1] < 0.9 * losses[1][0]


def test_dropout_repeats_from_run_to_run(
    make_device: Callable[..., CudaDevice],
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
) -> None:
    model, rows = tiny_model("llama", attention_dropout=0.3), [pack(documents(30)), pack(documents(17, seed=1))]
    losses = []
    for _ in range(2):
        run = start(model, store=model.store(grad_dtype=torch.bfloat16), device=make_device(), seed=5)
        losses.append([run.trainer.train_step(rows).loss for _ in range(3)])

    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_planes_are_pinned_while_the_device_lives(
    make_device: Callable[..., CudaDevice], tiny_model: Callable[..., TinyModel], start: Callable[..., Run]
) -> None:
    model, device = tiny_model("llama"), make_device()
    run = start(model, store=model.store(grad_dtype=torch.bfloat16), device=device)

    assert run.store.plane("hi").is_pinned() and run.store.plane("grad").is_pinned()
    assert not device.refusals
    run.trainer.close()
    device.close()
    assert not run.store.plane("hi").is_pinned()


def test_a_refused_registration_leaves_no_error_behind() -> None:
    runtime, memory = TorchCuda(), torch.zeros(1 << 20, dtype=torch.uint8)

    assert runtime.register(memory.data_ptr(), memory.numel()) == 0
    assert runtime.register(memory.data_ptr(), memory.numel()) != 0
    runtime.unregister(memory.data_ptr())

    assert float(torch.ones(8, device="cuda").sum()) == 8


def test_seconds_and_bytes_come_from_the_streams(
    make_device: Callable[..., CudaDevice],
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
) -> None:
    model = tiny_model("llama", hidden_size=512, intermediate_size=1024, head_dim=128)
    run = start(model, store=model.store(grad_dtype=torch.bfloat16), device=make_device())
    rows = [pack(documents(100))]
    run.trainer.train_step(rows)

    report = run.trainer.train_step(rows)

    assert 0 < report.compute_s < report.duration_s
    for direction in (report.h2d, report.d2h):
        assert 0 < direction.busy_s < report.duration_s and 0 <= direction.exposed_s < report.duration_s
    assert report.device_memory_bytes["workspace"] > 0


@pytest.mark.usefixtures("whole_device")
def test_a_device_that_is_too_small_is_told_with_numbers(
    tiny_model: Callable[..., TinyModel], start: Callable[..., Run], documents: Callable[..., list[Tensor]], pack: Pack
) -> None:
    model = tiny_model("llama")
    # Beside the arena's account the limit binds all that torch holds, and libraries hold some from earlier tests.
    device = CudaDevice(limit_bytes=torch.cuda.memory_reserved() + (48 << 20))
    run = start(model, store=model.store(grad_dtype=torch.bfloat16), device=device)
    num_rows = torch.cuda.memory_reserved() // (100 * 32 * 2 * 5) + 4000

    with pytest.raises(DoesNotFit, match="device memory: "):
        run.trainer.train_step([pack(documents(100, seed=i)) for i in range(num_rows)])


@pytest.mark.usefixtures("whole_device")
def test_memory_that_the_driver_refuses_in_the_middle_of_a_step_is_told_and_a_new_device_trains_on(
    tiny_model: Callable[..., TinyModel], start: Callable[..., Run], documents: Callable[..., list[Tensor]], pack: Pack
) -> None:
    model = tiny_model("llama", vocab_size=32768, max_position_embeddings=4096)
    device = CudaDevice()
    run = start(model, store=model.store(grad_dtype=torch.bfloat16), device=device)
    TorchCuda().limit_memory(torch.cuda.memory_reserved() + (96 << 20))

    # The logits of one chunk, 4096 x 32768 in fp32, are half a GiB.
    with pytest.raises(DoesNotFit, match="device memory: "):
        run.trainer.train_step([pack(documents(4096))])
    run.trainer.close()
    device.close()
    torch.cuda.set_per_process_memory_fraction(1.0)

    again = start(model, store=model.store(grad_dtype=torch.bfloat16), device=CudaDevice())
    assert again.trainer.train_step([pack(documents(4096))]).skipped == ""


@pytest.mark.usefixtures("whole_device")
@pytest.mark.parametrize("placement", ["device", "host"])
def test_the_plan_knows_the_device_peak_within_five_percent(
    placement: ActivationPlacement,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
    more = {"head_dim": 128, "vocab_size": 32768, "num_hidden_layers": 12, "max_position_embeddings": 2048}
    model = tiny_model("qwen2", **sizes, **more, layer_types=None)
    tokens, held_before = 16384, torch.cuda.memory_allocated()
    plan = ledger_of(
        model.template.layout,
        ModelShape.from_config(model.config.to_dict()),
        tokens_per_step=tokens,
        sequence_length=2048,
        device_kind="cuda",
        grad_bytes=2,
        activation_placement=placement,
    )
    store = model.store(grad_dtype=torch.bfloat16)
    run = start(model, store=store, device=CudaDevice(), tokens_per_step=tokens, activation_placement=placement)
    rows = [pack(documents(2048, seed=i)) for i in range(tokens // 2048)]
    run.trainer.train_step(rows)
    run.trainer.train_step(rows)

    peak = torch.cuda.max_memory_allocated() - held_before
    assert peak == pytest.approx(plan.device_total_bytes, rel=0.05), f"planned {dict(plan.device_bytes)}"


@pytest.mark.usefixtures("whole_device")
def test_masked_attention_has_finite_gradients_where_cudnns_has_none() -> None:
    # pytorch#196678: a mask, a row of 64 beyond a multiple of 128, and a query whose scores are all far below zero.
    TorchCuda()
    length, generator = 192, torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)
    )
    query[:, :, 100:] = 40.0
    key[...] = -3.0 + 0.01 * key
    leaves = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    position = torch.arange(length, device="cuda")
    mask = (position[:, None] >= position) & ((position[:, None] >= 96) == (position >= 96))

    out = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], attn_mask=mask)
    torch.autograd.backward(out, torch.randn_like(out))

    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    for leaf in leaves:
        assert leaf.grad is not None and bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("length", [64, 192, 320])
def test_packed_rows_of_any_length_train(
    length: int,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
) -> None:
    model = tiny_model("qwen2", head_dim=64, max_position_embeddings=512)
    # As large as the biases that make some models' scores extreme.
    weights = {n: 40 * w if "q_proj.bias" in n or "k_proj.bias" in n else w for n, w in model.weights.items()}
    store = dataclasses.replace(model, weights=weights).store(grad_dtype=torch.bfloat16)
    run = start(model, store=store, device=CudaDevice())

    report = run.trainer.train_step([pack(documents(length // 2 + 5, length // 2 - 5))])

    assert report.skipped == "" and math.isfinite(report.grad_norm)


@pytest.mark.usefixtures("whole_device")
def test_the_limit_of_an_earlier_device_does_not_bind_a_later_one() -> None:
    CudaDevice(limit_bytes=torch.cuda.memory_reserved() + (64 << 20)).close()
    device = CudaDevice()
    device.free(device.allocate("weights", 1 << 28, torch.bfloat16))
    device.close()


def test_the_device_is_the_one_with_the_uuid() -> None:
    last = torch.cuda.device_count() - 1
    device = device_for("cuda", gpu=f"GPU-{torch.cuda.get_device_properties(last).uuid}")
    weights = device.allocate("weights", 8, torch.bfloat16)
    assert weights.device == torch.device("cuda", last)
    device.free(weights)
    device.close()


def test_pinned_planes_cross_the_link_at_the_speed_of_a_bus(
    make_device: Callable[..., CudaDevice], tiny_model: Callable[..., TinyModel]
) -> None:
    device, out = make_device(), torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda")
    pinned = device.allocate_host("staging", out.numel(), torch.bfloat16)
    for direction in ("h2d", "d2h"):
        for _ in range(2):
            device.take_use()
            if direction == "h2d":
                device.upload(pinned, out)
            else:
                device.download(out, pinned)
            for queue in (device.h2d, device.d2h):
                queue.record().wait()
        use = getattr(device.take_use(), direction)
        assert use.bytes == 1 << 29
        # PCIe 3 x8 gives 6 GB/s, NVLink-C2C 450: beyond these the clock or the copy is not what it seems.
        assert 4e9 < use.bytes / use.busy_s < 1e12
    device.close()

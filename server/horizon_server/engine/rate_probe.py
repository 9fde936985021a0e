"""How fast this machine computes, copies and updates, measured with the engine itself: what `planning.step_time`
predicts steps from.

Products, attention and sums are timed alone. Whole layers are timed as training runs them (template, slots, recompute,
fp32 accumulation), on one-layer llamas of a few widths with random weights; what is left of their time after the parts
that were timed alone is what the elementwise traffic takes. So the model's sum is a measured one. Copies and the
optimizer run on a store of their own.

A run is bounded in time, by `budget_s` and what the last width takes beyond it, and in memory, by its widest model: the
process peaked at 2.3 GiB on the host device, and keeps 2.8 GiB of planes for the widest one on cuda.

Shapes: T = tokens of a row, C = tokens of a logits chunk, D = hidden size, V = vocabulary, H = heads.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig

from horizon_server.engine.cross_entropy import chunk_loss
from horizon_server.engine.device import device_for
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.linear import Accumulator, LinearMap, LinearMaps
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.bandwidth import adamw_bytes_per_parameter
from horizon_server.planning.model_folder import ModelFolder, ModelShape
from horizon_server.planning.rates import DeviceRates, WidthRates, rate_at
from horizon_server.planning.step_parts import StepWork
from horizon_server.planning.step_time import BACKWARD_OF_ATTENTION, Seconds
from horizon_server.planning.step_work import FUSED_LOGIT_BYTES, work_of_step
from horizon_server.recipe import Recipe
from horizon_server.records.execution import DEFAULT_COMPUTE_DTYPE, ComputeDtype, DeviceKind, Execution
from horizon_server.store.adamw import AdamWStep, update_unit
from horizon_server.store.cpus import update_threads
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout, with_compressed_states

# Of each thing, after one that is not counted. The quickest counts, unless asked otherwise: what else the machine does
# can only slow a run down.
_NUM_RUNS = 4

_HEAD_SIZE = 64
# Of the one-layer models: small, so that their head hardly counts.
_VOCABULARY = 256

_COPY_ELEMENTS = 1 << 24
_ROW_ELEMENTS = 512
# Layers and a row that are next to no work, so that their time is what starting it takes.
_LAUNCH_WIDTH, _LAUNCH_LAYERS, _FEW_TOKENS = 128, 4, 4
# Of a measured time, for the part that is not timed alone.
_SMALLEST_REST = 0.05

AnyDevice = HostDevice | CudaDevice
MakeDevice = Callable[[], AnyDevice]
Choose = Callable[[list[float]], float]
_STEP = AdamWStep(step=1, learning_rate=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is worth timing on a device: large enough to be typical, small enough to be quick."""

    widths: tuple[int, ...]
    attention_width: int
    row_tokens: int
    gemm_tokens: tuple[int, ...]
    document_tokens: tuple[int, ...]
    product: int
    chunk_tokens: int
    vocabulary: int


SIZES: Mapping[DeviceKind, Sizes] = {
    "host": Sizes(
        widths=(256, 512, 1024, 2048),
        attention_width=512,
        row_tokens=512,
        gemm_tokens=(16, 128, 512),
        document_tokens=(128, 512, 2048),
        product=1024,
        chunk_tokens=256,
        vocabulary=8192,
    ),
    "cuda": Sizes(
        widths=(1024, 2048, 4096),
        attention_width=2048,
        row_tokens=4096,
        gemm_tokens=(1024, 4096, 16384),
        document_tokens=(1024, 4096, 16384),
        product=8192,
        chunk_tokens=4096,
        vocabulary=32768,
    ),
}


def measure_rates(
    kind: DeviceKind,
    *,
    num_threads: int,
    compute_dtype: ComputeDtype | None = None,
    budget_s: float = 10.0,
    sizes: Sizes | None = None,
    make: MakeDevice | None = None,
    choose: Choose = min,
) -> DeviceRates:
    """Measure a device. The first width is always timed, a wider one only while its time is likely to be within the
    budget.

    Without a `compute_dtype`, the device's default. `sizes` are others than those that a plan wants. `make` is another
    way to make the device, with a link for example. `choose` takes one of several equal runs: the quickest, unless a
    caller compares with steps that a busy machine takes.

    Raises:
        InvalidSpec: the kind is cuda and torch finds no CUDA device.
    """
    sizes, start_s = sizes or SIZES[kind], time.perf_counter()
    compute_dtype = compute_dtype or DEFAULT_COMPUTE_DTYPE[kind]
    make = make or partial(device_for, kind, compute_dtype=compute_dtype, num_threads=num_threads)
    with closing(make()) as device:
        probe = _Probe(device=device, sizes=sizes, choose=choose)
        attention = probe.attention()
        copies = _copies(make, device.gradient_dtype, update_threads(num_threads, device_kind=kind), choose)
        rates = DeviceRates(
            name=torch.cuda.get_device_name() if kind == "cuda" else "host",
            num_threads=num_threads,
            peak_flops_per_s=probe.product(sizes.product, sizes.product, sizes.product),
            attention_forward_flops_per_s=tuple((tokens, forward) for tokens, forward, _ in attention),
            attention_backward_flops_per_s=tuple((tokens, backward) for tokens, _, backward in attention),
            accumulate_bytes_per_s=probe.sums(),
            widths=(),
            launches_add=kind == "host",
            h2d_bytes_per_s=copies.up,
            d2h_bytes_per_s=copies.down,
            gather_bytes_per_s=copies.gather,
            scatter_bytes_per_s=copies.scatter,
            zero_bytes_per_s=copies.zero,
            adamw_bytes_per_s=copies.adamw,
            compressed_parameters_per_s=_compressed(
                device.gradient_dtype, update_threads(num_threads, device_kind=kind), choose
            ),
        )
    started_s = {}
    for num_layers in (1, _LAUNCH_LAYERS):
        with closing(_Llama(make, _LAUNCH_WIDTH, sizes, num_layers=num_layers)) as model:
            started_s[num_layers] = model.step_s(_FEW_TOKENS, choose)
    launch_s = max(0.0, started_s[_LAUNCH_LAYERS] - started_s[1]) / (_LAUNCH_LAYERS - 1)
    rates = dataclasses.replace(
        rates,
        # Backward starts three times as many kernels as forward.
        forward_launch_s=launch_s / 4,
        backward_launch_s=launch_s * 3 / 4,
        ends_launch_s=max(0.0, started_s[1] - launch_s),
    )
    found: list[WidthRates] = []
    for hidden_size in sizes.widths:
        width_start_s = time.perf_counter()
        found.append(_measured_width(make, hidden_size, sizes, rates, choose))
        now_s = time.perf_counter()
        # Twice the width is four times the work.
        if now_s - start_s + 4 * (now_s - width_start_s) > budget_s:
            break
    return dataclasses.replace(rates, widths=tuple(found))


def _measured_width(make: MakeDevice, hidden_size: int, sizes: Sizes, rates: DeviceRates, choose: Choose) -> WidthRates:
    """The rates of one width; `rates` are those that all widths share."""
    with closing(make()) as device:
        probe = _Probe(device=device, sizes=sizes, choose=choose)
        gemm = tuple((tokens, probe.product(tokens, hidden_size, 3 * hidden_size)) for tokens in sizes.gemm_tokens)
        head_s = probe.head(hidden_size)
    with closing(_Llama(make, hidden_size, sizes, num_layers=1)) as model:
        step_s = model.step_s(sizes.row_tokens, choose)
        work = model.work(sizes.row_tokens)
    # With rates of one byte per second, seconds are bytes.
    width = WidthRates(
        hidden_size=hidden_size, gemm_flops_per_s=gemm, elementwise_bytes_per_s=1.0, head_bytes_per_s=1.0
    )
    logits = sizes.chunk_tokens * sizes.vocabulary
    head_gemm_s = 6 * logits * hidden_size / rate_at(gemm, sizes.chunk_tokens)
    head_bytes = FUSED_LOGIT_BYTES * device.compute_dtype.itemsize / 2 * logits
    width = dataclasses.replace(width, head_bytes_per_s=head_bytes / _rest(head_s, head_gemm_s))
    parts = Seconds.of(work, dataclasses.replace(rates, widths=(width,))).compute()
    traffic = parts.pop("elementwise") + parts.pop("embedding")
    rest_s = _rest(step_s, known_s := sum(parts.values()))
    # Products that were slower alone than in the layer would make the parts more than the whole.
    excess_s = known_s + rest_s - step_s
    faster = parts["gemm"] / max(parts["gemm"] - excess_s, _SMALLEST_REST * parts["gemm"])
    return dataclasses.replace(
        width,
        gemm_flops_per_s=tuple((tokens, faster * rate) for tokens, rate in gemm),
        elementwise_bytes_per_s=traffic / rest_s,
    )


def _rest(whole_s: float, known_s: float) -> float:
    """What is left of a measured time; a little at the least, where the processors were slower while the parts were
    timed alone."""
    return max(whole_s - known_s, _SMALLEST_REST * whole_s)


class _Llama:
    """A llama of few layers in a store, with its trainer."""

    def __init__(self, make: MakeDevice, hidden_size: int, sizes: Sizes, *, num_layers: int) -> None:
        num_heads = hidden_size // _HEAD_SIZE
        config = AutoConfig.for_model(
            "llama",
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=max(1, num_heads // 2),
            head_dim=_HEAD_SIZE,
            vocab_size=_VOCABULARY,
            max_position_embeddings=sizes.row_tokens,
            tie_word_embeddings=True,
        )
        template = Template.from_config(config)
        self._device = make()
        self._store = HostStore.allocate(template.layout, grad_dtype=self._device.gradient_dtype)
        self._store.plane("hi").normal_(std=0.02)
        self._recipe = Recipe(learning_rate=0.0)
        self._execution = Execution(
            device_kind=self._device.name,
            compute_dtype="bfloat16" if self._device.compute_dtype == torch.bfloat16 else "float32",
            grad_bytes=self._device.gradient_dtype.itemsize,
        )
        self._trainer = Trainer(template, self._store, self._device, self._recipe, self._execution, num_steps=1000)
        plain = config.to_dict()
        self._folder = ModelFolder(
            path=Path(), config=plain, shape=ModelShape.from_config(plain), headers={}, layout=template.layout
        )

    def work(self, num_tokens: int) -> StepWork:
        """A step of one row, as the model counts it."""
        recipe = dataclasses.replace(self._recipe, tokens_per_step=num_tokens, sequence_length=num_tokens)
        return work_of_step(self._folder, recipe, self._execution)

    def step_s(self, num_tokens: int, choose: Choose) -> float:
        """Seconds of compute in a step of one row."""
        ids_T = torch.randint(0, _VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(0))
        positions_T, lengths = torch.arange(num_tokens), (num_tokens,)
        row = MicroBatch(input_ids_T=ids_T, position_ids_T=positions_T, labels_T=ids_T, document_lengths=lengths)

        def compute_s() -> float:
            seconds = self._trainer.train_step([row]).compute_s
            # The update would take cores from the next run.
            self._trainer.flush()
            return seconds

        return _chosen(compute_s, choose)

    def close(self) -> None:
        # A device unpins what it has pinned when it is closed, so it goes before the memory does.
        self._trainer.close()
        self._device.close()
        self._store.close()


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """Times single operations on a device."""

    device: AnyDevice
    sizes: Sizes
    choose: Choose

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of compute."""

        def compute_s() -> float:
            self.device.compute.submit(work)
            self.device.compute.record().wait()
            self.device.raise_failure()
            return self.device.take_use().compute_s

        return _chosen(compute_s, self.choose)

    def product(self, num_tokens: int, num_inputs: int, num_outputs: int) -> float:
        """Operations per second of a projection's three products: forward, and both of backward."""
        inputs, outputs = (_random(self.device, num_tokens, size) for size in (num_inputs, num_outputs))
        weight, gradient = (_random(self.device, num_outputs, num_inputs) for _ in range(2))

        def products() -> None:
            torch.matmul(inputs, weight.t())
            torch.matmul(outputs, weight)
            # As in training, not into memory that the system has to find first.
            torch.mm(outputs.t(), inputs, out=gradient)

        return 6 * num_tokens * num_inputs * num_outputs / self.seconds(products)

    def sums(self) -> float:
        """Bytes per second of adding gradients of the compute dtype to fp32 sums."""
        addend = _random(self.device, _COPY_ELEMENTS // 4)
        total = self.device.place(torch.zeros(addend.numel()))
        return _sum_bytes(self.device) * addend.numel() / self.seconds(lambda: total.add_(addend))

    def attention(self) -> list[tuple[int, float, float]]:
        """Document length, operations per second forward, and backward with 2.5 times as many."""
        found = []
        for num_tokens in self.sizes.document_tokens:
            width = self.sizes.attention_width
            query, key, value = (
                _random(self.device, 1, width // _HEAD_SIZE, num_tokens, _HEAD_SIZE).requires_grad_() for _ in range(3)
            )

            def attend(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> Tensor:
                return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

            def forward(attend: Callable[[], Tensor] = attend) -> None:
                with torch.no_grad():
                    attend()

            def both(attend: Callable[[], Tensor] = attend, leaves: tuple[Tensor, ...] = (query, key, value)) -> None:
                torch.autograd.grad(attend(), leaves, leaves[0].detach())

            flops = 4 * width * num_tokens * (num_tokens + 1) / 2
            forward_s = self.seconds(forward)
            backward_s = _rest(self.seconds(both), forward_s)
            found.append((num_tokens, flops / forward_s, BACKWARD_OF_ATTENTION * flops / backward_s))
        return found

    def head(self, hidden_size: int) -> float:
        """Seconds of a logits chunk: loss, gradients, and adding the projection's to its sum."""
        sizes = self.sizes
        hidden_CD = _random(self.device, sizes.chunk_tokens, hidden_size).requires_grad_()
        weight_VD = _random(self.device, sizes.vocabulary, hidden_size).requires_grad_()
        out_VD = self.device.place(torch.zeros(sizes.vocabulary, hidden_size))
        accumulator = Accumulator(out=out_VD, first=torch.tensor(False))
        targets_C = self.device.place(torch.zeros(sizes.chunk_tokens, dtype=torch.int64))

        def chunk() -> None:
            with LinearMaps([(weight_VD, LinearMap(accumulator=accumulator))]):
                logits_CV = functional.linear(hidden_CD, weight_VD)
            values_CV = logits_CV.detach()
            chunk_loss(values_CV, targets_C, divisor=sizes.chunk_tokens, gradient_SV=values_CV)
            torch.autograd.backward(logits_CV, values_CV)
            hidden_CD.grad = None

        return self.seconds(chunk)


def _sum_bytes(device: AnyDevice) -> int:
    """Of one element: the addend read, the sum read and written."""
    return device.compute_dtype.itemsize + 8


@dataclass(frozen=True, kw_only=True)
class _Copies:
    """Bytes per second: units up and down, embedding rows up and back, clearing their table's gradient, the
    optimizer."""

    up: float
    down: float
    gather: float
    scatter: float
    zero: float
    adamw: float


def _copies(make: MakeDevice, grad_dtype: torch.dtype, num_threads: int, choose: Choose) -> _Copies:
    """Bytes per second up, down and through the optimizer, over units in memory files, as in a job; and of embedding
    rows."""
    num_units = 4
    num_rows = _COPY_ELEMENTS // num_units // _ROW_ELEMENTS
    shapes = {f"model.layers.{i}.w.weight": (_COPY_ELEMENTS // num_units,) for i in range(num_units)}
    table = "model.embed_tokens.weight"
    layout = build_layout({table: (num_rows, _ROW_ELEMENTS), **shapes}, num_layers=num_units, tied=True)
    layers = [unit for unit in layout.units if unit.kind == "layer"]
    turn = itertools.cycle(layers)  # so that no run finds its memory in a cache
    with closing(HostStore.allocate(layout, grad_dtype=grad_dtype)) as store, closing(make()) as device:
        device.adopt(store)
        weights = device.allocate("weights", layers[0].num_elements, device.compute_dtype)
        gradient = device.allocate("gradients", layers[0].num_elements, torch.float32)
        # Uninitialised memory may hold subnormal numbers, which processors compute far more slowly.
        gradient.zero_()
        numbers = device.allocate_host("staging", len(layout.units), torch.float64)
        # Half of the table in an order that no cache foresees.
        rows_R = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))[: max(1, num_rows // 2)]
        rows_RD = weights[: rows_R.numel() * _ROW_ELEMENTS].view(-1, _ROW_ELEMENTS)
        landed_RD = torch.zeros(rows_R.numel(), _ROW_ELEMENTS, dtype=grad_dtype)
        table_VD = store.tensor(table, "grad")

        def copied(queue: str) -> float:
            getattr(device, queue).record().wait()
            device.raise_failure()
            use = getattr(device.take_use(), queue)
            return float(use.busy_s / use.bytes)

        def up() -> float:
            device.upload_unit(store, next(turn).index, weights)
            return copied("h2d")

        def down() -> float:
            unit = next(turn)
            device.download_unit(gradient, store.unit(unit.index, "grad"), numbers[unit.index])
            return copied("d2h")

        def rows_up() -> float:
            device.upload_rows(store, table, rows_R, rows_RD)
            return copied("h2d")

        def scatter() -> None:
            table_VD[rows_R] = landed_RD

        def clear() -> None:
            table_VD.zero_()

        def update() -> None:
            update_unit(store, next(turn).index, _STEP, num_threads=num_threads)

        update_bytes = layers[0].num_elements * adamw_bytes_per_parameter(grad_dtype.itemsize)
        rates = _Copies(
            up=1 / _chosen(up, choose),
            down=1 / _chosen(down, choose),
            gather=1 / _chosen(rows_up, choose),
            scatter=landed_RD.nbytes / _chosen(partial(_timed, scatter), choose),
            zero=table_VD.nbytes / _chosen(partial(_timed, clear), choose),
            adamw=update_bytes / _chosen(partial(_timed, update), choose),
        )
        device.free_host(numbers)
    return rates


def _compressed(grad_dtype: torch.dtype, num_threads: int, choose: Choose) -> float:
    """Parameters with compressed states that the optimizer updates in a second, over units in memory files."""
    num_units = 4
    shapes = {f"model.layers.{i}.w.weight": (_COPY_ELEMENTS // num_units // 64, 64) for i in range(num_units)}
    layout = with_compressed_states(
        build_layout({"model.embed_tokens.weight": (1, 1), **shapes}, num_layers=num_units, tied=True)
    )
    turn = itertools.cycle([unit.index for unit in layout.units if unit.kind == "layer"])
    with closing(HostStore.allocate(layout, grad_dtype=grad_dtype)) as store:

        def update() -> None:
            update_unit(store, next(turn), _STEP, num_threads=num_threads)

        return layout.units[1].compressed_elements / _chosen(partial(_timed, update), choose)


def _random(device: AnyDevice, *shape: int) -> Tensor:
    # Of a size that models have: larger ones would make probabilities subnormal, which processors compute far more
    # slowly.
    return device.place((0.02 * torch.randn(shape)).to(device.compute_dtype))


def _timed(work: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _chosen(measure: Callable[[], float], choose: Choose) -> float:
    # The first run allocates and compiles what later ones find.
    measure()
    return choose([measure() for _ in range(_NUM_RUNS)])

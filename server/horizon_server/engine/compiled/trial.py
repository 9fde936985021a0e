"""Whether a compiled layer may take the eager one's place: the same numbers within rounding, in less time.

Shapes: T = tokens of the trial, D = hidden size.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_server.engine.compiled.call_pattern import LayerCase, NotCompilable
from horizon_server.engine.compiled.library import Target
from horizon_server.engine.compiled.package import LayerCode
from horizon_server.engine.fp8 import Fp8Visit, Fp8Weight, by_columns, by_rows
from horizon_server.engine.linear import LinearMap, LinearMaps

# Of a tensor's norm. Sums in another order differ by less, another formula by far more.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
# A difference in a last bit decides which way a value is rounded to 8 bits. In bf16 that happens to every 64th or so,
# because a compiled layer does not round to bf16 what it casts; FP8 itself changes gradients by as much.
_FP8_TOLERANCE = {torch.float32: 3e-2, torch.bfloat16: 0.12}
_NEGLIGIBLE = 3e-2
_NUM_PAIRS = 5


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a trial found. `error` is the greatest relative difference of an output or gradient, which is that of
    `worst`.

    `speedup` is the eager layer's time for forward, recompute and backward, over the compiled layer's.
    """

    error: float
    worst: str
    speedup: float


def tolerance_of(target: Target) -> float:
    """The greatest `error` that rounding explains."""
    return (_TOLERANCE if target.matmul == "bf16" else _FP8_TOLERANCE)[target.dtype]


def try_layer(case: LayerCase, code: LayerCode, returned: tuple[str, ...]) -> Trial:
    """Run a layer compiled and eagerly on the same random numbers, and time both in turn. `returned` are the parameters
    whose gradients the code returns, in order."""
    template, layer, call, device = case.template, case.layer, case.call, case.device
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], scale: float = 1.0, dtype: torch.dtype = case.dtype) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)

    places = template.places[layer + 1]
    # Of the usual scale, so that what a layer adds to the hidden state is about as large as the state itself.
    parameters = {
        place.name: random(place.piece.shape, _scale(place.piece.shape), place.dtype_in(case.dtype)) for place in places
    }
    # Of the random weights: outputs are as large as they would be without magnitudes.
    parameters |= template.norms(layer, parameters)
    hidden_1TD, gradient_1TD = (random((1, case.num_tokens, template.hidden_size)) for _ in range(2))
    call_tensors = case.pattern.tensors_of(call)
    if call_tensors is None:
        raise NotCompilable("the trial's call is not one of the pattern")
    trained = [place.name for place in places if place.trained]
    matrices = [place.name for place in places if place.is_matrix]
    accumulators = {name: torch.zeros_like(parameters[name], dtype=torch.float32) for name in matrices}
    # Cast before the clock runs: a job casts once a visit, for all micro-batches.
    for_forward, for_backward = (Fp8Visit(places, case.matmul, for_backward=on).of(parameters) for on in (False, True))

    def maps(parameters: Mapping[str, Tensor], casts: Mapping[str, Fp8Weight]) -> LinearMaps | None:
        return LinearMaps((parameters[n], LinearMap(cast=cast)) for n, cast in casts.items()) if casts else None

    def eager() -> dict[str, Tensor]:
        with torch.no_grad():
            output = template.layer(layer, parameters, hidden_1TD, call, maps(parameters, for_forward))
        leaves = {name: parameters[name].detach().requires_grad_() for name in trained}
        hidden, own = hidden_1TD.detach().requires_grad_(), {**parameters, **leaves}
        again = template.layer_for_gradients(layer, own, hidden, call, maps(own, for_backward))
        found = torch.autograd.grad(again, [hidden, *leaves.values()], gradient_1TD, allow_unused=True)
        tensors = {"output": output, **dict(zip(["hidden state", *trained], found, strict=True))}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def compiled() -> dict[str, Tensor]:
        first = torch.ones((), dtype=torch.bool)
        flags = {name: first.clone() for name in matrices}
        with torch.no_grad():
            inputs = [*parameters.values(), *by_rows(for_forward), hidden_1TD, *call_tensors]
            output = code.forward(list(inputs))
            targets = [part for name in matrices for part in (accumulators[name], flags[name])]
            hidden, *others = code.backward([*inputs, gradient_1TD, *by_columns(for_backward), *targets])
        tensors = {"output": output, "hidden state": hidden}
        tensors |= {name: accumulators[name] for name in matrices if not flags[name]}
        for name, value in zip(returned, others, strict=True):
            # A weight with uses besides linear maps has a gradient from each.
            tensors[name] = tensors[name] + value if name in tensors else value
        return tensors

    error, worst = _worst(eager(), compiled())
    pairs = [(_timed(eager, device), _timed(compiled, device)) for _ in range(_NUM_PAIRS)]
    return Trial(error=error, worst=worst, speedup=statistics.median(a / b for a, b in pairs))


def _scale(shape: tuple[int, ...]) -> float:
    return 1.0 if len(shape) < 2 else shape[-1] ** -0.5


def relative_differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """The differences of tensors, relative to what is expected.

    A gradient that is zero but for rounding (of a bias that softmax does not see) counts relative to the largest of
    all.
    """
    norms = {name: float(value.double().norm()) / value.numel() ** 0.5 for name, value in expected.items()}
    floor = _NEGLIGIBLE * max(norms.values())
    return {
        name: float((value.double() - found[name].double()).norm()) / value.numel() ** 0.5 / max(norms[name], floor)
        for name, value in expected.items()
    }


def _worst(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[float, str]:
    """The greatest relative difference, and the tensor that has it."""
    if expected.keys() != found.keys():
        odd = ", ".join(sorted(expected.keys() ^ found.keys()))
        raise NotCompilable(f"compiled and eager code differ in which parameters have gradients: {odd}")
    differences = relative_differences(expected, found)
    # A NaN is no small difference, and no comparison sees it.
    odd_ones = [name for name, value in differences.items() if not math.isfinite(value)]
    worst = odd_ones[0] if odd_ones else max(differences, key=differences.__getitem__)
    return math.inf if odd_ones else differences[worst], worst


def _timed(run: Callable[[], object], device: torch.device) -> float:
    started_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s

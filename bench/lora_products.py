"""Are the products of adapters faster as one product where their maps have the same input?

`x A_q'`, `x A_k'` and `x A_v'` can be one product with the stacked A's, and so can those of gate and up. Both ways are
timed in turns, forward and backward, beside the frozen maps of the layer that they belong to: what counts is the share
of a layer's time. Attention and everything elementwise are left out, so the shares are upper ends.

Times are of the processor, on one thread, so that other processes on the machine count little.

Shapes: T = tokens, D = hidden size, R = rank, O = outputs of a map.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_GROUPS = (("q", "k", "v"), ("gate", "up"))


def _shapes(hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    keys = hidden // 4
    return {
        "q": (hidden, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, hidden),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }


def separate(x_TD: Tensor, maps_RD: Sequence[Tensor], gradients_TR: Sequence[Tensor]) -> list[Tensor]:
    """Each product, the gradient of each map, and the sum of the input's."""
    found = [x_TD @ map_RD.T for map_RD in maps_RD]
    found += [gradient_TR.T @ x_TD for gradient_TR in gradients_TR]
    total_TD = gradients_TR[0] @ maps_RD[0]
    for gradient_TR, map_RD in zip(gradients_TR[1:], maps_RD[1:], strict=True):
        total_TD.addmm_(gradient_TR, map_RD)
    return [*found, total_TD]


def stacked(x_TD: Tensor, maps_RD: Tensor, gradients_TR: Sequence[Tensor]) -> list[Tensor]:
    """The same of all maps at once: they lie one after the other, the gradients of their outputs do not."""
    gradient_TR = torch.cat(list(gradients_TR), dim=1)
    return [x_TD @ maps_RD.T, gradient_TR.T @ x_TD, gradient_TR @ maps_RD]


def frozen(inputs: Sequence[Tensor], weights_OD: Sequence[Tensor], gradients_TO: Sequence[Tensor]) -> None:
    """The layer's own maps: forward, recompute but for the last one, and the gradients of the inputs."""
    for _ in range(2):
        for x_TD, weight_OD in zip(inputs, weights_OD, strict=True):
            x_TD @ weight_OD.T
    for gradient_TO, weight_OD in zip(gradients_TO, weights_OD, strict=True):
        gradient_TO @ weight_OD


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def measure(rank: int, *, hidden: int, inner: int, tokens: int, dtype: torch.dtype, pairs: int) -> tuple[float, ...]:
    """Seconds of the products apart and as one, for all groups of a layer, and of the layer's frozen maps; and the
    largest relative difference of the two ways."""
    shapes, generator = _shapes(hidden, inner), torch.Generator().manual_seed(rank)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    groups = []
    for names in _GROUPS:
        maps = drawn(len(names) * rank, hidden) / hidden**0.5
        groups.append((drawn(tokens, hidden), maps, [drawn(tokens, rank) for _ in names]))

    def apart() -> list[list[Tensor]]:
        return [separate(x, maps.split(rank), gradients) for x, maps, gradients in groups]

    def as_one() -> list[list[Tensor]]:
        return [stacked(x, maps, gradients) for x, maps, gradients in groups]

    inputs = [drawn(tokens, inputs) for _, inputs in shapes.values()]
    weights = [drawn(*shape) / shape[1] ** 0.5 for shape in shapes.values()]
    outputs = [drawn(tokens, outputs) for outputs, _ in shapes.values()]
    difference = max(
        float((one[-1] - other[-1]).float().norm() / other[-1].float().norm())
        for one, other in zip(as_one(), apart(), strict=True)
    )
    times: list[list[float]] = [[], []]
    for pair in range(pairs):
        ways = ((0, apart), (1, as_one))
        for place, way in ways if pair % 2 else ways[::-1]:
            times[place].append(_seconds(way))
    layer_s = statistics.median(_seconds(lambda: frozen(inputs, weights, outputs)) for _ in range(3))
    return statistics.median(times[0]), statistics.median(times[1]), layer_s, difference


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=1408)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--pairs", type=int, default=41)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| rank | apart, ms | as one, ms | layer's maps, ms | saved of a layer | difference |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rank in arguments.ranks:
        apart_s, one_s, layer_s, difference = measure(
            rank,
            hidden=arguments.hidden,
            inner=arguments.inner,
            tokens=arguments.tokens,
            dtype=getattr(torch, arguments.dtype),
            pairs=arguments.pairs,
        )
        saved = (apart_s - one_s) / (layer_s + apart_s)
        apart_ms, one_ms, layer_ms = 1e3 * apart_s, 1e3 * one_s, 1e3 * layer_s
        print(f"| {rank} | {apart_ms:.2f} | {one_ms:.2f} | {layer_ms:.1f} | {saved:.1%} | {difference:.0e} |")


if __name__ == "__main__":
    main()

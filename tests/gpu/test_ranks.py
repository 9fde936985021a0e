"""Ranks that share one CUDA device give the bits of one rank. They are threads with streams of their own; what crosses
between ranks goes through the CPU, because NCCL refuses two ranks on one device. NCCL itself runs with one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.ranks import results, rows_of, whole_life
from tests.support.tiny_models import Engine
from torch import Tensor

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.ranks import GroupName, QueueName, Ranks
from horizon_server.process_variables import CHILD_VARIABLES
from horizon_server.records.execution import Parallel

if TYPE_CHECKING:
    from tests.support.tiny_models import TinyModel

pytestmark = pytest.mark.gpu

MakeDevice = Callable[..., CudaDevice]

_NCCL = """
import sys
from pathlib import Path

import torch

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.ranks import Meeting, Ranks
from horizon_server.records.execution import Execution

torch.cuda.set_device(0)
device = CudaDevice()
execution = Execution(device_kind="cuda", compute_dtype="bfloat16", grad_bytes=2, parallel="rows")
ranks = Ranks.join(0, Meeting(file=Path(sys.argv[1])), execution, shared_fd=-1)
assert ranks.path == "nccl" and ranks.gathers
for queue in (device.h2d, device.compute, device.d2h):
    for dtype in (torch.float32, torch.bfloat16):
        source = torch.arange(1000, device="cuda").to(dtype)
        whole, received = source.clone(), torch.zeros_like(source)

        def work(source=source, whole=whole, received=received, name=queue.name):
            ranks.complete(whole, [slice(0, 1000)], name)
            ranks.exchange(received, source, [1000], [1000], name)

        # The queue's stream does not wait for the one that has made these.
        torch.cuda.synchronize()
        queue.submit(work, label="collectives")
        queue.record().wait()
        assert torch.equal(whole, source) and torch.equal(received, source), (queue.name, dtype)
device.close()
print("done")
"""


class StagedRanks(Ranks):
    """Sends tensors of a device by way of the CPU."""

    def complete(self, out: Tensor, parts: Sequence[slice], queue: QueueName) -> None:
        staged = out.cpu()
        super().complete(staged, parts, queue)
        out.copy_(staged)

    def exchange(
        self, out: Tensor, source: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], among: GroupName
    ) -> None:
        staged = out.cpu()
        super().exchange(staged, source.cpu(), out_sizes, sizes, among)
        out.copy_(staged)

    def collect(self, own: Tensor, queue: QueueName) -> Tensor:
        return super().collect(own.cpu(), queue).to(own.device)

    def broadcast(self, values: Tensor, queue: QueueName) -> None:
        staged = values.cpu()
        super().broadcast(staged, queue)
        values.copy_(staged)


@pytest.mark.parametrize("delays", [{}, {"max_delay_s": 0.002, "poison_on_free": True}], ids=["quick", "delayed"])
@pytest.mark.parametrize(
    ("model_type", "parallel", "gathers", "ranks"),
    [
        ("qwen3", "rows", True, (1, 1, 2)),
        ("llama", "rows", True, (1, 3)),
        ("llama", "rows", False, (1, 2)),
        ("qwen3", "layers", False, (1, 2, 3)),
        ("llama", "layers", False, (1, 2)),
    ],
)
def test_any_number_of_ranks_gives_the_same_bits(
    engine: Engine,
    make_device: MakeDevice,
    model_type: str,
    parallel: Parallel,
    gathers: bool,
    ranks: tuple[int, ...],
    delays: dict[str, Any],
) -> None:
    model: TinyModel = engine.tiny_model(model_type)
    first, *others = results(
        model,
        whole_life(rows_of(engine)),
        ranks=ranks,
        parallel=parallel,
        gathers=gathers,
        kind=StagedRanks,
        make_device=lambda _: make_device(**delays),
        device_kind="cuda",
        compute_dtype="bfloat16",
        grad_bytes=2,
        grad_dtype=torch.bfloat16,
        max_grad_norm=0.5,
    )
    for num_ranks, (said, planes) in zip(ranks[1:], others, strict=True):
        assert [name for name in planes if planes[name] != first[1][name]] == [], num_ranks
        assert said == first[0], num_ranks


def test_nccl_carries_what_the_queues_give_it(tmp_path: Path) -> None:
    """With one rank, so of its calls, types and streams only."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **CHILD_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", _NCCL, str(tmp_path / "meeting")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-2000:]

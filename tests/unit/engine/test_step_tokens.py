from __future__ import annotations

import torch

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch, StepTokens


def row(ids: list[int], labels: list[int], lengths: tuple[int, ...]) -> MicroBatch:
    return MicroBatch(
        input_ids_T=torch.tensor(ids),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        labels_T=torch.tensor(labels),
        document_lengths=lengths,
    )


def test_ids_are_renumbered_over_the_whole_step() -> None:
    device = HostDevice(num_threads=1)
    tokens = StepTokens.of([[row([90, 4, 90], [4, 90, -100], (3,)), row([7, 4], [-100, -100], (2,))]], device)
    device.close()

    assert tokens.rows_R.tolist() == [4, 7, 90]
    assert tokens.rows_R[tokens.row_ids_N].tolist() == [90, 4, 90, 7, 4]
    assert tokens.spans == (slice(0, 3), slice(3, 5))
    assert tokens.supervised_S.tolist() == [0, 1]
    assert tokens.targets_S.tolist() == [4, 90]
    assert tokens.num_targets == 2


def test_the_positions_of_every_micro_batch_are_where_compiled_code_reads_them_without_a_copy() -> None:
    device = HostDevice(num_threads=1)
    rows = [row([5] * sum(lengths), [5] * sum(lengths), lengths) for lengths in ((3,), (2, 3), (4,), (1,))]
    tokens = StepTokens.of([rows], device)
    device.close()

    for found, given in zip(tokens.position_ids, rows, strict=True):
        assert torch.equal(found, given.position_ids_T)
        assert found.data_ptr() % 16 == 0

from __future__ import annotations

import time

import torch

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch, StepTokens
from horizon_server.spec.fields import MAX_ROW_TOKENS


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


def test_chunks_know_the_documents_that_go_through_them() -> None:
    device = HostDevice(num_threads=1)
    rows = [row([1] * 20, [1] * 20, (3, 9, 1, 7)), row([1] * 4, [1] * 4, (4,)), row([1] * 9, [1] * 9, (9,))]
    tokens = StepTokens.of([rows], device, chunk_tokens=4)
    device.close()

    assert [ends.tolist() for ends in tokens.boundaries] == [
        *([0, 3, 4], [0, 4], [0, 4], [0, 1, 4], [0, 4]),
        [0, 4],
        *([0, 4], [0, 4], [0, 1]),
    ]
    assert [chunk and chunk.seen for chunk in tokens.chunks] == [0, 3, 3, 12, 13, None, 0, 0, 0]
    assert tokens.backward_order(0) == [4, 3, 2, 1, 0, 5, 8, 7, 6]


def test_the_longest_row_of_the_smallest_chunks_and_documents_is_divided_in_time() -> None:
    """Nothing is quadratic in the chunks or the documents: 65,536 of each took minutes."""
    num_tokens, document = MAX_ROW_TOKENS, 64
    ids = torch.ones(num_tokens, dtype=torch.int64)
    long = MicroBatch(
        input_ids_T=ids,
        position_ids_T=torch.arange(document).repeat(num_tokens // document),
        labels_T=ids,
        document_lengths=(document,) * (num_tokens // document),
    )
    device = HostDevice(num_threads=1)
    start_s = time.process_time()
    tokens = StepTokens.of([[long]], device, chunk_tokens=64)
    order = tokens.backward_order(0)
    took_s = time.process_time() - start_s
    device.close()

    assert order == list(reversed(range(num_tokens // 64)))
    assert took_s < 30

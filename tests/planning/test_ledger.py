"""The ledger of operations on tensors."""

import torch
from torch import nn

from gpipe.planning.ledger import Ledger


def test_a_tensor_is_alive_until_nobody_refers_to_it() -> None:
    with Ledger() as ledger:
        first = torch.zeros(1000)
        view = first[:10]
        assert ledger.live_bytes == 4000
        del first
        assert ledger.live_bytes == 4000
        del view
    assert ledger.live_bytes == 0 and ledger.peak_bytes == 4000


def test_what_a_graph_keeps_is_alive() -> None:
    value = torch.zeros(1000, requires_grad=True)
    with Ledger([value]) as ledger:
        output = (value * 2).exp()  # exp keeps its result, the product nothing
        assert ledger.live_bytes == 4000
        del output
    assert ledger.live_bytes == 0


def test_tensors_from_elsewhere_count_where_they_are_held() -> None:
    outside, held = torch.zeros(1000), torch.zeros(500)
    with Ledger([outside]) as ledger:
        ledger.hold([held, held])
        _ = outside.view(10, 100)
        assert ledger.live_bytes == 2000


def test_what_comes_after_a_tensor_from_elsewhere_is_gone_is_not_taken_for_it() -> None:
    outside = [torch.zeros(1000)]
    with Ledger(outside) as ledger:
        outside.clear()
        kept = [torch.zeros(1000) for _ in range(10)]
        assert ledger.live_bytes == sum(tensor.nbytes for tensor in kept)


def test_moments_are_noted_from_their_start() -> None:
    with Ledger() as ledger:
        torch.zeros(1000)
        before = torch.zeros(5)
        ledger.start_moments([before])
        kept = torch.zeros(10)
        ledger.added_bytes = 7
        torch.zeros(20)
        del before
        torch.zeros(1)
    assert ledger.moments == [(20, 0, 20, 0), (20 + kept.nbytes, 0, 20, 0), (60 + 80, 7, 20, 0), (40 + 4, 7, 0, 0)]


def test_what_waits_counts_once_it_is_dead_unless_it_was_set_aside() -> None:
    with Ledger() as ledger:
        aside, waits, other = (torch.zeros(size) for size in (5, 10, 20))
        ledger.start_moments([aside])
        for tensor in (aside, waits):
            ledger.wait(tensor.untyped_storage())
        torch.zeros(1)
        del aside, waits, other, tensor
        torch.zeros(1)
        waiting = [moment.waiting for moment in ledger.moments]
        ledger.start_moments()
    assert waiting == [0, 0, 4 * 10]
    assert ledger.moments[0].waiting == 0


def test_nothing_waits_beyond_the_next_start() -> None:
    with Ledger() as ledger:
        waits = torch.zeros(10)
        ledger.wait(waits.untyped_storage())
        ledger.start_moments()
        del waits
        torch.zeros(1)
    assert [moment.waiting for moment in ledger.moments] == [0, 0]


def test_what_is_set_aside_is_a_part_of_what_is_alive() -> None:
    outside = torch.zeros(1000)
    with Ledger([outside]) as ledger:
        aside = torch.zeros(5)
        ledger.start_moments([outside, aside])
        del aside
        torch.zeros(1)
    assert [(moment.live, moment.aside) for moment in ledger.moments] == [(20, 20), (4, 0)]


def test_what_is_done_beside_the_ledger_is_told_and_not_counted() -> None:
    left, right = torch.zeros(4, 8), torch.zeros(8, 16)
    with Ledger() as ledger:
        kept, work, peak_bytes = ledger.run_beside(lambda: (torch.zeros(10), left @ right)[1])
        assert (peak_bytes, len(work)) == (kept.nbytes + 40, 2)
        assert ledger.moments == [] and ledger.work == []


def test_work_is_the_flops_of_products_and_the_bytes_of_everything() -> None:
    left, right = torch.zeros(4, 8), torch.zeros(8, 16)
    with Ledger() as ledger:
        product = left @ right
        product.t()  # a view moves nothing
        product + 1
    (flops, moved), (none, added) = ledger.take_work()
    assert (flops, moved) == (2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 4 * 16))
    assert (none, added) == (0, 4 * 2 * 4 * 16)
    assert ledger.take_work() == ()


def test_memory_that_is_only_allocated_or_not_looked_up_is_not_moved() -> None:
    table, index = torch.zeros(1000, 50), torch.zeros(1000, 1, dtype=torch.int64)
    with Ledger() as ledger:
        torch.empty_like(table)
        assert ledger.take_work() == ()
        table.gather(1, index)
        table.scatter_add_(1, index, torch.zeros(1000, 1))
        torch.add(table, 1, out=table[:])
        nn.functional.embedding(index[:10], table)
        table[index[:10]]
        table.index_select(0, index[:10, 0])
    looked_up, _, added, written, *rows = (work.bytes_moved for work in ledger.take_work())
    assert rows == [10 * (8 + 2 * 50 * 4)] * 3
    assert (looked_up, added, written) == (1000 * (8 + 2 * 4), 1000 * (8 + 3 * 4), 2 * table.nbytes)

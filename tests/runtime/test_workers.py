"""Attention in workers overlaps with the engine's thread, keeps its order, and fails where it is waited for."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from runtime.engine.setup import AttentionWorkers

pytestmark = pytest.mark.usefixtures("two_threads")

RETRY_SECONDS = 20.0


def after(event: threading.Event, value: float = 0.0) -> Callable[[], torch.Tensor]:
    def compute() -> torch.Tensor:
        assert event.wait(RETRY_SECONDS)
        return torch.tensor(value)

    return compute


def test_the_submitting_thread_goes_on_meanwhile() -> None:
    with AttentionWorkers() as workers:
        gate = threading.Event()
        pending = workers.submit(after(gate, 3.0))
        assert not pending.done()
        gate.set()
        assert pending.result() == 3.0
        assert pending.done()


def test_one_worker_computes_in_the_order_of_submission() -> None:
    seen: list[int] = []
    with AttentionWorkers(num_workers=1) as workers:
        gate = threading.Event()
        workers.submit(after(gate))
        others = [workers.submit(lambda i=i: torch.tensor(seen.append(i) or i)) for i in range(5)]
        gate.set()
        assert [int(pending.result()) for pending in reversed(others)] == [4, 3, 2, 1, 0]
        assert seen == [0, 1, 2, 3, 4]


def test_two_workers_compute_side_by_side() -> None:
    meeting = threading.Barrier(2)

    def compute() -> torch.Tensor:
        meeting.wait(RETRY_SECONDS)
        return torch.ones(1)

    with AttentionWorkers(num_workers=2) as workers:
        for pending in [workers.submit(compute) for _ in range(2)]:
            assert pending.result() == 1


def test_an_error_is_raised_where_it_is_waited_for_and_the_worker_goes_on() -> None:
    def fail() -> torch.Tensor:
        raise ValueError("lane 7")

    with AttentionWorkers() as workers:
        failed, following = workers.submit(fail), workers.submit(lambda: torch.ones(1))
        assert following.result() == 1
        with pytest.raises(ValueError, match="lane 7"):
            failed.result()


def test_submit_waits_when_as_many_as_allowed_are_under_way() -> None:
    with AttentionWorkers(max_pending=2) as workers:
        gate, has_submitted = threading.Event(), threading.Event()
        pending = [workers.submit(after(gate)) for _ in range(2)]
        third = threading.Thread(target=lambda: (workers.submit(after(gate)).result(), has_submitted.set()))
        third.start()
        time.sleep(0.05)
        assert workers._pool._work_queue.qsize() == 1, "one runs, one is queued, the third is held back"
        gate.set()
        third.join(RETRY_SECONDS)
        assert has_submitted.is_set()
        assert all(p.done() for p in pending)


def test_close_waits_for_what_runs_and_drops_what_does_not() -> None:
    gate, has_begun = threading.Event(), threading.Event()

    def compute() -> torch.Tensor:
        has_begun.set()
        return after(gate, 1.0)()

    workers = AttentionWorkers()
    running, queued = workers.submit(compute), workers.submit(compute)
    assert has_begun.wait(RETRY_SECONDS)
    threading.Timer(0.05, gate.set).start()
    workers.close()
    assert running.result() == 1
    assert queued.cancelled()
    for _ in range(20):  # more than are allowed under way: a refused one takes no room
        with pytest.raises(RuntimeError):
            workers.submit(compute)


def test_workers_use_one_torch_thread_and_inference_mode_and_leave_others_alone() -> None:
    before = torch.get_num_threads()
    with AttentionWorkers(num_workers=2) as workers:
        pending = [
            workers.submit(lambda: torch.tensor([torch.get_num_threads(), torch.is_inference_mode_enabled()]))
            for _ in range(4)
        ]
        assert [p.result().tolist() for p in pending] == [[1, 1]] * 4
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *others] == [before, before]

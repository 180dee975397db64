"""Attention off the engine's thread: it hands in a lane's attention, goes on with the next lane, and comes back for
the answer."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier, BoundedSemaphore

import torch

from ..closing import Closing


class AttentionWorkers(Closing):
    """Owns the threads; computes begin in the order in which they were submitted. Closing waits for those that run and
    drops those that do not yet.

    One worker by default: `decode_attention` divides each lane over threads, so that the lane which the engine needs
    first is done first. On 2 cores, 6 lanes of attention beside products on both cores took 149 ms so, 189 ms with a
    thread each in two workers, and 180 ms one after the other (the best of 25 turns, cores shared; attention then had
    threads of its own, now those of `shared_work`, which serve a product beside it once they are free). A
    worker's own torch operators are small and stay in its thread, as OpenMP would start a team of threads for each
    worker beside the engine's.
    """

    def __init__(self, *, num_workers: int = 1, max_pending: int = 8):
        self._room = BoundedSemaphore(max_pending)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="attend")
        self._limit_torch_threads(num_workers)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, compute: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        """Returns at once, unless `max_pending` computes are under way: then when the first of them has ended."""
        self._room.acquire()
        try:
            future = self._pool.submit(_attend, compute)
        except RuntimeError:  # closed
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _limit_torch_threads(self, num_workers: int) -> None:
        """The limit is each thread's own, but torch also keeps the last number set, and gives it to a thread that first
        asks: so a worker asks before it sets its own, and afterwards the number is put back for threads to come."""
        num_threads = torch.get_num_threads()
        all_started = Barrier(num_workers)

        def limit() -> None:
            torch.get_num_threads()
            torch.set_num_threads(1)
            all_started.wait()

        for started in [self._pool.submit(limit) for _ in range(num_workers)]:
            started.result()
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def _attend(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    return compute()

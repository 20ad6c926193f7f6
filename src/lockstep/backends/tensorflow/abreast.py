"""Abreast: the replicas of one process, each computing in a thread of its own.

TensorFlow lets go of Python's lock while it computes. The results come to the thread
that asked, in each replica's own order. Computing runs ahead of the thread that asked; *placing*
does not: what one result was placed in may be used for the next as soon as that thread comes back.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from queue import Queue
from threading import Event, Semaphore, Thread
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Placed = TypeVar("Placed")


def run(
    work: Mapping[int, Sequence[Item]],
    compute: Callable[[int, Item], Result],
    place: Callable[[Item, Result], Placed],
) -> Generator[tuple[Item, Placed], None, None]:
    """Gives (item, place(item, compute(replica, item))) for the items of every replica, as they come.

    >>> sorted(run({0: [1, 2], 1: [3]}, lambda replica, item: 10 * replica + item, lambda item, result: -result))
    [(1, -1), (2, -2), (3, -13)]
    """
    busy = {replica: items for replica, items in work.items() if items}
    here, *others = busy or [0]  # the first replica computes in this thread
    stop = Event()
    room = {replica: Semaphore(1) for replica in others}
    results: Queue[tuple[int, Any, Any]] = Queue()  # (replica, item, what was placed or the error)

    def one(replica: int) -> None:
        for item in busy[replica]:
            try:
                result = compute(replica, item)
                room[replica].acquire()
                if stop.is_set():
                    return
                results.put((replica, item, place(item, result)))
            except BaseException as error:
                results.put((replica, item, error))
                return

    def taken() -> Generator[tuple[Item, Placed], None, None]:
        replica, item, placed = results.get()
        if isinstance(placed, BaseException):
            raise placed
        yield item, placed
        room[replica].release()

    threads = [Thread(target=one, args=(replica,), name=f"replica {replica}") for replica in others]
    for thread in threads:
        thread.start()
    left = sum(len(busy[replica]) for replica in others)
    try:
        for item in busy.get(here, ()):
            yield item, place(item, compute(here, item))
            while left and not results.empty():
                yield from taken()
                left -= 1
        for _ in range(left):
            yield from taken()
    finally:
        stop.set()
        for each in room.values():
            each.release()
        for thread in threads:
            thread.join()

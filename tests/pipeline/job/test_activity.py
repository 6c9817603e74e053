"""What a process says it is doing, while one thread works for it or several do."""

from __future__ import annotations

import threading

from gpipe.pipeline.job.activity import Activity


def describe(micro_batch: int, doing: str) -> str:
    return f"micro-batch {micro_batch}, {doing}"


def test_the_tasks_of_all_threads_are_named() -> None:
    activity = Activity()
    activity.start(describe, 0, "forward")
    thread = threading.Thread(target=activity.start, args=(describe, 1, "backward"))
    thread.start()
    thread.join()
    assert str(activity) == "micro-batch 0, forward and micro-batch 1, backward"
    activity.stop()
    assert str(activity) == "micro-batch 1, backward"
    activity.clear()
    assert str(activity) == "between two steps"


def test_a_thread_that_has_no_task_stops_nothing() -> None:
    activity = Activity()
    thread = threading.Thread(target=activity.start, args=(describe, 0, "forward"))
    thread.start()
    thread.join()
    activity.stop()
    assert str(activity) == "micro-batch 0, forward"

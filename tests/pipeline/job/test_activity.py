"""What a process says it is doing, while one thread works for it or several do."""

from __future__ import annotations

import threading

import pytest

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


def test_what_is_done_beside_the_tasks_is_named_once_and_as_long_as_it_lasts() -> None:
    activity = Activity()
    with activity.doing_beside("saving"):
        assert str(activity) == "between two steps, while saving"
        with activity.doing("saving"):
            assert str(activity) == "saving"
    assert str(activity) == "between two steps"


def test_what_failed_is_named_until_all_is_cleared() -> None:
    activity = Activity()
    with pytest.raises(KeyError), activity.doing("loading data"):
        raise KeyError
    assert str(activity) == "loading data"
    activity.clear()
    assert str(activity) == "between two steps"

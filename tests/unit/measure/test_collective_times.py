"""What the flight recorder of NCCL's groups says of the calls of a step."""

from __future__ import annotations

from collections.abc import Iterator

from raybench.measure.collective_times import Entry, call_times

SIZES = {"all": 4, "pair": 2}


def record(*steps: list[tuple[str, str, float | None]]) -> list[Entry]:
    """What is recorded of steps: name, group and ms of each call."""

    def entries() -> Iterator[Entry]:
        for number, (name, group, ms) in enumerate(call for step in steps for call in step):
            known = {} if ms is None else {"duration_ms": ms}
            place = {"record_id": number, "process_group": (group, "undefined"), "retired": True}
            yield {"profiling_name": f"nccl:{name}", **place, **known}

    return list(entries())


def test_calls_are_told_by_kind_and_group_with_medians_over_the_steps() -> None:
    steps = [
        [
            ("_all_gather_base", "all", 1.0 + step),
            ("_reduce_scatter_base", "all", 10.0),
            ("all_gather_into_tensor_coalesced", "all", 3.0),
            ("all_reduce", "pair", 5.0 * step),
            ("allreduce_coalesced", "pair", 1.0),
            ("all_to_all", "all", 7.0),
            ("all_reduce_barrier", "all", 0.5),
        ]
        for step in range(3)
    ]
    assert call_times(record(*steps), SIZES, len(steps[0])) == {
        ("all_gather", 4): (2.0, 3.0),
        ("reduce_scatter", 4): (10.0,),
        ("all_reduce", 2): (5.0, 1.0),
        ("all_to_all", 4): (7.0,),
        ("barrier", 4): (0.5,),
    }


def test_calls_that_are_issued_as_one_have_one_time() -> None:
    step = [("send 0->1", "pair", None), ("recv 0<-1", "pair", None), ("coalesced", "pair", 2.0)]
    assert call_times(record(step, step), SIZES, 3) == {("coalesced", 2): (2.0,)}


def test_steps_whose_beginning_is_overwritten_are_left_out() -> None:
    steps = [[("all_reduce", "all", ms), ("broadcast", "all", ms)] for ms in (9.0, 9.0, 1.0, 3.0)]
    kept = record(*steps)[3:]
    assert call_times(kept, SIZES, 2) == {("all_reduce", 4): (2.0,), ("broadcast", 4): (2.0,)}


def test_nothing_is_told_of_a_kind_that_was_not_timed_in_all_steps_or_of_no_step() -> None:
    steps = [[("all_reduce", "all", None)], [("all_reduce", "all", 1.0)]]
    assert call_times(record(*steps), SIZES, 1) == {}
    assert call_times(record(steps[1]), SIZES, 2) == {}
    assert call_times([], SIZES, 1) == {}

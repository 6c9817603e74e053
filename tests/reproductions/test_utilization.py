"""The table of a GPU's utilisation."""

from reproductions.table2_throughput.step_costs import TRANSFORMER_UTILIZATION, transformer_utilization


def test_without_a_gpu_nothing_is_claimed() -> None:
    expected = "Not run: python -m experiments.transformer_utilization, which needs a GPU.\n"
    assert transformer_utilization([]) == TRANSFORMER_UTILIZATION.run([]) == expected


def test_only_what_is_compiled_and_kept_is_judged() -> None:
    rows = [
        {"rematerialize": mode, "compiled": compiled, "step_seconds": 0.5, "tokens_per_second": 65536.0,
         "utilization": share}
        for mode, compiled, share in (("never", False, 0.45), ("never", True, 0.40), ("always", True, 0.39))
    ]  # fmt: skip
    record = TRANSFORMER_UTILIZATION.make_record({}, {"rows": rows})
    lines = transformer_utilization([record]).splitlines()[2:]
    assert lines == [
        "| never | no | 500.0 | 65,536 | 45.0% |  |",
        "| never | yes | 500.0 | 65,536 | 40.0% | reached |",
        "| always | yes | 500.0 | 65,536 | 39.0% |  |",
    ]

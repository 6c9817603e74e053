"""The peak of the memory of a process begins anew where it is reset."""

import sys

import pytest
import torch

from gpipe.pipeline.measurement.step_report import measure_peak_memory, reset_peak_memory

CPU = [torch.device("cpu")]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can begin anew")
def test_the_peak_is_that_since_it_was_reset() -> None:
    size = 300 << 20
    assert reset_peak_memory() is None  # of earlier tests
    block = bytearray(b"1" * size)
    with_block = measure_peak_memory(CPU)
    del block
    assert measure_peak_memory(CPU) == with_block
    assert reset_peak_memory() is None
    assert measure_peak_memory(CPU) < with_block - size // 2

"""Parameter counts of the paper's models, computed without memory on the meta device (paper section 4 and Table 1)."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe.models import AmoebaNet, amoebanet_a, amoebanet_b, amoebanet_c, amoebanet_d


def count(build: Callable[..., nn.Sequential], *sizes: int, **options: bool) -> int:
    with torch.device("meta"):
        model = build(*sizes, **options)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "plain", "with_auxiliary_head"),
    [
        (18, 208, 81_137_437, 81_785_166),
        (18, 416, 317_541_696, 318_277_617),
        (18, 544, 540_196_240, 540_986_433),
        (36, 544, 1_053_293_776, 1_054_083_969),
        (72, 512, 1_842_610_248, 1_843_386_873),
    ],
)
def test_amoebanet_d_has_the_parameters_of_table_1(
    num_layers: int, num_filters: int, plain: int, with_auxiliary_head: int
) -> None:
    assert count(amoebanet_d, num_layers, num_filters) == plain
    assert count(amoebanet_d, num_layers, num_filters, 1001, auxiliary_head=True) == with_auxiliary_head


def test_the_default_models_have_the_published_numbers_of_parameters() -> None:
    assert count(amoebanet_a) == 86_718_765  # Real et al. 2019: 86.7M
    assert count(amoebanet_b) == 557_277_864  # the paper: 557M
    assert round(count(amoebanet_c) / 1e6, 1) == 155.3  # Real et al. 2019: 155.3M
    assert count(amoebanet_d) == 121_911_016


def test_amoebanet_d_of_table_3() -> None:
    assert count(amoebanet_d, 18, 128) == 31_555_384


def test_every_cell_is_one_layer_and_the_auxiliary_head_changes_no_name() -> None:
    with torch.device("meta"):
        plain, with_head = amoebanet_d(6, 16), amoebanet_d(6, 16, auxiliary_head=True)
    assert isinstance(plain, AmoebaNet) and len(plain) == len(with_head) == 1 + 2 + 6 + 2 + 1
    added = set(with_head.state_dict()) - set(plain.state_dict())
    assert set(plain.state_dict()) <= set(with_head.state_dict())
    assert added and all(name.startswith("7.auxiliary_head.") for name in added)


def test_names_are_readable_and_stable() -> None:
    with torch.device("meta"):
        names = set(amoebanet_d(3, 16).state_dict())
    assert {
        "0.conv.weight",
        "1.project_state.conv.weight",
        "2.project_previous.shifted_conv.weight",
        "3.sums.state3.right.operation.core.1.norm.running_mean",
        "8.fully_connected.bias",
    } <= names

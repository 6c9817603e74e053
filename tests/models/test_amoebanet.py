"""Whole models: shapes, outputs, initialisation, memory format, precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe.models import AmoebaNet, amoebanet_a, amoebanet_b, amoebanet_c, amoebanet_d
from gpipe.models.amoebanet_cells import Cell

BUILDERS = [amoebanet_a, amoebanet_b, amoebanet_c, amoebanet_d]
SIZES = [3, 32, 33, 64, 65, 224, 480]
REDUCTIONS = {1, 2, 4, 6}  # layers of a model with one normal cell a group


def make_model(build: Callable[..., AmoebaNet] = amoebanet_d, **options: float) -> AmoebaNet:
    torch.manual_seed(0)
    return build(3, 16, 10, image_size=32, batch_norm_momentum=0.1, **options)


def images(num_examples: int = 4, size: int = 32) -> Tensor:
    return torch.randn(num_examples, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("build", BUILDERS)
def test_every_image_size_fits(build: Callable[..., AmoebaNet]) -> None:
    with torch.device("meta"):
        model = build(3, 16, 10)
    for size in (3, 32, 65):  # each kind of map: of one pixel, even and odd
        payload = torch.empty(2, 3, size, size + 2, device="meta")
        edges = ((size - 1) // 2, (size + 1) // 2)
        for index, layer in enumerate(list(model)[:-1]):
            payload = layer(payload)
            if isinstance(layer, Cell):
                edges = tuple((edge + 1) // 2 for edge in edges) if index in REDUCTIONS else edges
                assert payload[0].shape == (2, layer.out_channels, *edges)
        assert model[-1](payload).shape == (2, 10)


@pytest.mark.parametrize("size", SIZES)
def test_the_auxiliary_head_fits_every_image_size(size: int) -> None:
    with torch.device("meta"):
        model = amoebanet_d(3, 16, 10, image_size=(size, size + 2), auxiliary_head=True)
        logits, auxiliary_logits = model(torch.empty(2, 3, size, size + 2))
    assert logits.shape == auxiliary_logits.shape == (2, 10)


@pytest.mark.parametrize("build", BUILDERS)
def test_every_parameter_gets_a_gradient(build: Callable[..., AmoebaNet]) -> None:
    model = make_model(build, auxiliary_head=True, dropout=0.5, drop_path=0.1)
    logits, auxiliary_logits = model(images())
    (logits.square().mean() + 0.4 * auxiliary_logits.square().mean()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_six_layers_train_with_and_without_the_auxiliary_head() -> None:
    for auxiliary_head in (False, True):
        torch.manual_seed(0)
        model = amoebanet_d(6, 16, 10, image_size=32, auxiliary_head=auxiliary_head)
        output = model(images())
        assert isinstance(output, tuple) == auxiliary_head
        sum(part.square().mean() for part in (output if auxiliary_head else (output,))).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_auxiliary_head_is_not_computed_in_eval_mode() -> None:
    model = make_model(auxiliary_head=True).eval()
    head = next(layer.auxiliary_head for layer in model if getattr(layer, "auxiliary_head", None) is not None)
    head.register_forward_hook(lambda *_: pytest.fail("the auxiliary head was computed"))
    payload = model[:-1](images())
    assert len(payload) == 2
    assert isinstance(model(images()), Tensor)


def test_the_auxiliary_head_sees_the_last_cell_of_the_second_group() -> None:
    model = make_model(auxiliary_head=True)
    assert [getattr(layer, "auxiliary_head", None) is not None for layer in model].index(True) == 5
    payload = images()
    num_entries = []
    for layer in list(model)[:-1]:
        payload = layer(payload)
        num_entries.append(1 if isinstance(payload, Tensor) else len(payload))
    assert num_entries == [1, 2, 2, 2, 2, 3, 3, 3]


def test_the_auxiliary_head_changes_nothing_else() -> None:
    with_head, without = make_model(auxiliary_head=True), make_model()
    without.load_state_dict({name: with_head.state_dict()[name] for name in without.state_dict()})
    assert torch.equal(with_head(images())[0], without(images()))


def test_another_image_size_than_the_auxiliary_head_was_built_for_is_refused() -> None:
    model = make_model(auxiliary_head=True)
    with pytest.raises(ValueError, match=r"got a map of \(8, 8\), expected \(2, 2\): build the model"):
        model(images(2, 128))
    assert model.eval()(images(2, 128)).shape == (2, 10)


def test_whatever_owns_parameters_can_be_reset_after_to_empty() -> None:
    with torch.device("meta"):
        model = make_model(auxiliary_head=True)
    states = []
    for _ in range(2):
        model.to_empty(device="cpu")
        for tensor in model.state_dict().values():
            tensor.fill_(-77)
        torch.manual_seed(3)
        for module in model.modules():
            if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)):
                module.reset_parameters()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]) and not (tensor == -77).any(), name


@pytest.mark.parametrize("build", BUILDERS)
def test_channels_last_changes_nothing_but_the_memory_format(build: Callable[..., AmoebaNet]) -> None:
    torch.manual_seed(0)
    # 32 filters: a tensor of 1 channel, as 16 would give, has no memory format of its own.
    model = build(3, 32, 10).eval()
    expected = model(images())
    model = model.to(memory_format=torch.channels_last)
    payload = images().contiguous(memory_format=torch.channels_last)
    for layer in list(model)[:-1]:
        payload = layer(payload)
        state = payload if isinstance(payload, Tensor) else payload[0]
        assert state.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model[-1](payload), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", BUILDERS)
def test_bfloat16_autocast_stays_close_to_float32(build: Callable[..., AmoebaNet]) -> None:
    model = make_model(build).eval()
    expected = model(images())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images())
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.03 * expected.norm()


def test_batch_norm_settings_reach_every_batch_norm() -> None:
    with torch.device("meta"):
        defaults, changed = amoebanet_d(3, 16), amoebanet_d(3, 16, batch_norm_momentum=0.2, batch_norm_epsilon=0.5)
    for model, momentum, epsilon in ((defaults, 0.0003, 0.001), (changed, 0.2, 0.5)):
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        assert len(norms) == 80
        assert all(norm.momentum == pytest.approx(momentum) and norm.eps == epsilon for norm in norms)


def test_image_channels_reach_the_stem() -> None:
    assert amoebanet_d(3, 16, 10, image_channels=1).eval()(torch.randn(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_layers", 7),
        ("num_layers", 0),
        ("num_filters", 7),
        ("num_classes", 0),
        ("image_size", 2),
        ("dropout", 1.0),
        ("drop_path", -0.5),
    ],
)
def test_a_wrong_setting_is_refused_by_name(option: str, value: float) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=rf"^{option} is .*{value}.*, expected .*: .*\.$"):
        amoebanet_d(**{"num_layers": 3, "num_filters": 16, option: value})


def test_an_unknown_option_is_refused() -> None:
    with torch.device("meta"), pytest.raises(TypeError, match="drop_paths"):
        amoebanet_d(3, 16, drop_paths=0.1)

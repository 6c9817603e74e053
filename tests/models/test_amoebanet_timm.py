"""The models as timm's users meet them."""

import pytest
import torch

import gpipe.models  # before timm, which imports torchvision

# isort: split
import timm
from timm.data import resolve_data_config


def create(name: str = "amoebanet_d", **options: object) -> gpipe.models.AmoebaNet:
    torch.manual_seed(0)
    model = timm.create_model(name, **{"num_layers": 3, "num_filters": 16, "num_classes": 10, **options})
    assert isinstance(model, gpipe.models.AmoebaNet)
    return model


def test_all_four_are_registered() -> None:
    assert timm.list_models("amoebanet_*") == ["amoebanet_a", "amoebanet_b", "amoebanet_c", "amoebanet_d"]
    assert timm.list_models("amoebanet_*", pretrained=True) == []


def test_timm_makes_the_plain_model() -> None:
    model = create("amoebanet_b")
    torch.manual_seed(0)
    plain = gpipe.models.amoebanet_b(3, 16, 10)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_timm_s_words_for_options_are_understood() -> None:
    model = create(in_chans=1, drop_rate=0.25, drop_path_rate=0.125, img_size=32, auxiliary_head=True)
    assert model[0].conv.in_channels == 1
    assert model[-1].dropout.p == 0.25
    assert model[1].sums["state2"].left.drop_path.drop_prob == 0.125
    assert model[5].auxiliary_head.map_size == (2, 2)


def test_pretrained_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="amoebanet_d has no published weights: leave it False and train"):
        create(pretrained=True)


def test_the_description_leads_to_the_data_settings() -> None:
    model = create()
    settings = resolve_data_config(model=model)
    assert settings["input_size"] == (3, 224, 224) and settings["mean"] == (0.5, 0.5, 0.5)
    assert model.pretrained_cfg["num_classes"] == 10
    assert model.get_submodule(model.pretrained_cfg["classifier"]) is model.get_classifier()
    assert model.get_submodule(model.pretrained_cfg["first_conv"]) is model[0].conv


def test_features_and_head_make_the_model() -> None:
    model = create().eval()
    images = torch.randn(2, 3, 32, 32)
    features = model.forward_features(images)
    assert features.shape == (2, model.num_features, 1, 1)
    assert torch.equal(model.forward_head(features), model(images))
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)


def test_reset_classifier_replaces_both_heads() -> None:
    model = create(img_size=32, auxiliary_head=True).double()
    model.reset_classifier(7)
    logits, auxiliary_logits = model(torch.randn(2, 3, 32, 32).double())
    assert logits.shape == auxiliary_logits.shape == (2, 7)
    assert model.num_classes == 7


def test_reset_classifier_with_no_classes_leaves_the_features() -> None:
    model = create(img_size=32, auxiliary_head=True)
    model.reset_classifier(0)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, model.num_features)
    assert model.num_classes == 0
    model.reset_classifier(5)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_another_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="global_pool is 'max', expected 'avg'"):
        create().reset_classifier(5, "max")
    with pytest.raises(ValueError, match="global_pool is 'max', expected 'avg'"):
        create(global_pool="max")


def test_a_model_made_with_no_classes_is_that_whose_classifier_was_removed() -> None:
    model, removed = create(num_classes=0, global_pool="avg"), create()
    removed.reset_classifier(0)
    assert model.num_classes == model.pretrained_cfg["num_classes"] == 0
    assert model.state_dict().keys() == removed.state_dict().keys()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), removed(images))

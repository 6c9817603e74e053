"""Register the AmoebaNets with timm: after `import gpipe.models`, `timm.create_model("amoebanet_d")` makes one."""

from collections.abc import Callable
from typing import Any

from timm.models import generate_default_cfgs, register_model

from gpipe.models.amoebanet import AmoebaNet, amoebanet_a, amoebanet_b, amoebanet_c, amoebanet_d, refuse_other_pool

# timm's name -> ours
_OPTION_NAMES = {
    "in_chans": "image_channels",
    "img_size": "image_size",
    "drop_rate": "dropout",
    "drop_path_rate": "drop_path",
}
# timm passes these to every model; they say where weights come from.
_WEIGHT_OPTIONS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


# timm looks for this name in the module of a registered function. Pixels are in [-1, 1], and the central crop is the
# public TPU code's.
default_cfgs = generate_default_cfgs(
    {
        f"amoebanet_{variant}": {
            "num_classes": 1000,
            "input_size": (3, image_size, image_size),
            "pool_size": None,
            "crop_pct": 0.875,
            "interpolation": "bicubic",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "first_conv": "0.conv",
            "classifier": "23.fully_connected",
        }
        for variant, image_size in (("a", 331), ("b", 480), ("c", 331), ("d", 224))
    }
)


def _register(build: Callable[..., AmoebaNet]) -> None:
    """Register `build` with timm under its own name."""
    name = build.__name__

    def create(pretrained: bool = False, **options: Any) -> AmoebaNet:
        if pretrained:
            raise ValueError(f"pretrained is True, but {name} has no published weights: leave it False and train.")
        for option in _WEIGHT_OPTIONS:
            options.pop(option, None)
        refuse_other_pool(options.pop("global_pool", None))
        is_headless = options.get("num_classes") == 0
        if is_headless:
            options["num_classes"] = 1  # a softmax layer to remove
        model = build(**{_OPTION_NAMES.get(option, option): value for option, value in options.items()})
        if is_headless:
            model.reset_classifier(0)
        model.pretrained_cfg = model.default_cfg = {
            **default_cfgs[name].default.to_dict(),
            "architecture": name,
            "num_classes": model.num_classes,
            "classifier": f"{len(model) - 1}.fully_connected",
        }
        return model

    create.__name__ = create.__qualname__ = name
    create.__doc__ = build.__doc__
    register_model(create)


for _build in (amoebanet_a, amoebanet_b, amoebanet_c, amoebanet_d):
    _register(_build)

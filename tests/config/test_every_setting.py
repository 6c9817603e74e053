"""Every setting, with values that make no sense: refused in a line, or fine for a stated reason."""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe import config
from gpipe.config import ConfigError, register_schemas, to_run
from gpipe.config.plan import PlanConfig
from gpipe.config.predict import PredictConfig
from gpipe.config.run import to_settings
from gpipe.config.translate import TranslateConfig
from gpipe.launch.errors import _make_sentence
from tests.config.composition import composed

pytestmark = pytest.mark.usefixtures("composer")
# Together they have every dataclass of settings.
BASES = (
    ("train", "optimizer=rmsprop"),
    ("train", "model=transformer_lm_small", "data=random_tokens", "optimizer=adafactor"),
    ("train", "model=translation_small", "data=multilingual_embedded", "optimizer=adamw"),
    ("train", "model=timm", "data=image_folder", "optimizer=sgd"),
    ("train", "model=timm", "data=image_table"),
    ("train", "model=transformers", "data=text_folder"),
    ("plan",),
    ("predict", "checkpoint=here", "images=here"),
    ("translate", "checkpoint=here", "text=Hallo"),
)
ZERO, NEGATIVE, INFINITE, NONE = ("0",), ("-1",), ("inf", "nan"), ("null",)
OF_64_BITS, BEYOND = "9000000000000000000", "100000000000000000000"
HUGE = (OF_64_BITS, BEYOND, "1e20")
EMPTY, LIST, WORD = ("''",), ("[1,2]",), ("word",)
VALUES = (*ZERO, *NEGATIVE, *HUGE, *INFINITE, *NONE, *EMPTY, *LIST, *WORD)
TEXTS = (*ZERO, *NEGATIVE, *HUGE, *INFINITE, *EMPTY, *WORD)
# Of each program: what tells Hydra the shape of its settings, and what checks them.
PROGRAMS: dict[str, tuple[Callable[[], None], Callable[[DictConfig], Any]]] = {
    "train": (register_schemas, to_run),
    "plan": (lambda: register_schemas(PlanConfig), to_run),
    "predict": (lambda: register_schemas(PredictConfig, "predict_schema"), to_settings),
    "translate": (lambda: register_schemas(TranslateConfig, "translate_schema"), to_settings),
}
# They declare what others share.
ABSTRACT = {"Section", "DataConfig", "ImagesConfig", "TokensConfig", "ModelConfig", "OptimizerConfig"}
# Which of them a setting takes, and why; "<dataclass>: " stands before one that others of its name do not share.
FINE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "a folder, a file or a name that is looked up before anything is built, or written beside the figures",
        (
            r"init_from|evaluate|reproduction|data\.(name|root|tokenizer|cache)|trainer\.resume_from|tracking\.project"
            r"|PlanConfig: device|checkpoint|images|output|grid"
        ),
        TEXTS,
    ),
    (
        "the first part of the run's folder, or a name that timm is asked for",
        r"name|model\.name",
        (*ZERO, OF_64_BITS, BEYOND, *INFINITE, *WORD),
    ),
    ("a sentence", r"text", (*ZERO, *NEGATIVE, *HUGE, *INFINITE, *WORD)),
    ("a name that transformers is asked for", r"TransformersConfig: model\.name", NEGATIVE),
    (
        "yes or no, for which YAML has numbers too",
        (
            r"model\.(auxiliary_head|scale_feedforward|soft_limit)|data\.(flip|keep_aspect)|model\.pretrained|pipeline\.synchronize_batch_norm"
            r"|pipeline\.check_recomputation|optimizer\.times_batch_size|ema\.warm_up|trainer\.(channels_last|compile|cuda_graphs|deterministic|dry_run|evaluation\.raw)|launch\.(pin_cores|debug|shard_optimizer|device_threads)"
            r"|data\.several_labels|calibrate|debug"
        ),
        (*ZERO, *NEGATIVE, OF_64_BITS, BEYOND),
    ),
    (
        "zero is none, or the first",
        (
            r"seed|model\.(auxiliary_weight|dropout|drop_path)"
            r"|data\.(color_jitter|cutout|mixup|cutmix|random_erasing|num_workers|max_broken_images)"
            r"|optimizer\.(weight_decay|momentum|beta1|beta2)|RMSPropConfig: optimizer\.decay"
            r"|schedule\.warm_up_epochs|ema\.decay"
            r"|trainer\.(label_smoothing|num_untimed_steps|profile_step|non_finite\.max_skipped_steps)|launch\.max_restarts"
            r"|length_penalty|max_length_a"
        ),
        ZERO,
    ),
    (
        "null is off, unlimited, or chosen by the program",
        (
            r"init_from|evaluate|reproduction|model\.logit_limit"
            r"|data\.(root|crop_scale|mixup|cutmix|random_erasing|languages|tokenizer|max_pairs|cache|validation_share)"
            r"|data\.(max_images|validation_images)"
            r"|data\.(num_classes|image_size|center_crop|keep_aspect|interpolation|mean|std)"
            r"|pipeline\.(memory_limit_bytes|partitions)|optimizer\.clip_norm|schedule\.warm_up_steps|ema\.decay"
            r"|trainer\.(max_steps|timeline_every_steps|overfit_batches|profile_step|max_hours|resume_from|channels_last|cuda_graphs|deterministic|float32_matmul_precision)|pipeline\.check_recomputation"
            r"|trainer\.evaluation\.(every_epochs|every_steps|max_batches|statistics_batches|patience|raw)"
            r"|trainer\.checkpoints\.(every_steps|keep)|launch\.(num_threads|gpus_per_node|device_threads)"
            r"|TextFolderConfig: data\.vocabulary_size|data\.several_labels"
            r"|memory_gib|link_gb_per_second|find|num_devices|output|grid|file"
        ),
        NONE,
    ),
    ("a number that is never multiplied", r"seed|pipeline\.memory_limit_bytes", (OF_64_BITS,)),
    ("two of what it lists", r"data\.(crop_aspect|languages)|pipeline\.partitions", LIST),
)


def settings_of(settings: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place of each setting, and the dataclass that it is in."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from settings_of(value, f"{place}{field.name}.")
        else:
            yield f"{place}{field.name}", type(settings).__name__


def refusal_of(program: str, settings: DictConfig, place: str, value: str) -> str | None:
    """Return the message with which a program refuses a value, None where it is taken; the value stays."""
    word = f"{place}={value}"
    (override,) = OverridesParser.create().parse_overrides([word])
    try:
        OmegaConf.update(settings, place, override.value())
        PROGRAMS[program][1](settings)
    except OmegaConfBaseException as error:
        refused = HydraException(f"Error merging override {word}")  # as Hydra says it
        refused.__cause__ = error
        return _make_sentence(refused)
    except ConfigError as error:
        return _make_sentence(error)
    return None


def test_a_value_is_refused_in_a_line_that_names_the_setting_or_is_fine() -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for program, *words in BASES:
        register, check = PROGRAMS[program]
        register()
        settings = compose(program, overrides=words)
        for place, kind in settings_of(check(settings)):
            if (place, kind) in found:
                continue
            changed = settings.copy()  # one for all values: each is put in the place of the one before
            messages = {value: refusal_of(program, changed, place, value) for value in VALUES}
            found[place, kind] = {value for value, message in messages.items() if message is None}
            for value, message in messages.items():
                assert message is None or (place in message and "\n" not in message), (value, message)
    modules = [importlib.import_module(f"gpipe.config.{each.name}") for each in pkgutil.iter_modules(config.__path__)]
    declared = {name for m in modules for name, c in vars(m).items() if is_dataclass(c) and c.__module__ == m.__name__}
    assert {kind for _, kind in found} | ABSTRACT == declared
    for (place, kind), taken in found.items():
        names = place, f"{kind}: {place}"
        fine = {v for _, known, values in FINE if any(map(re.compile(known).fullmatch, names)) for v in values}
        assert taken == fine, (place, kind)


@pytest.mark.parametrize(
    "word",
    [
        "data.num_workers=100000", "data.image_size=1000000", "pipeline.num_stages=100000", "launch.num_processes=5000",
        "launch.num_replicas=5000", "launch.num_threads=100000", "pipeline.timeout_seconds=1e-9",
    ],
)  # fmt: skip
def test_a_number_that_would_bring_the_machine_down_or_end_every_run_is_refused(word: str) -> None:
    place, _, value = word.partition("=")
    message = refusal_of("train", composed(), place, value)
    assert (
        message is not None and message.startswith(f"{place} is ") and message.endswith(f"set {place}=... accordingly.")
    )

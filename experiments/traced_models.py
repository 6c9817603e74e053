"""Turn models of others into sequences of layers, and compare these with the models, bit by bit.

    python -m experiments.traced_models

The models are one small architecture of at most 60 million parameters per family of timm, every classification model of
torchvision, and GPT-2, BERT, T5, Llama and ViT of transformers, small and with random weights. Each is traced. Then the
layers and a copy of the model train on the same two examples from the same seed: outputs, gradients, state and outputs
in evaluation are compared. A quarter of an hour on two cores, and up to 16 GB of memory.
"""

import copy
import itertools
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import gpipe._compat.torchvision  # before torchvision and timm

# isort: split

import timm
import torch
import torchvision
import transformers
from torch import nn

import gpipe
from experiments.program import StudyProgram, track
from gpipe.planning.accelerator import ACCELERATORS, Speed
from gpipe.planning.exact_cut import partition_layers
from gpipe.planning.profile import profile_layers
from gpipe.tracing.errors import TracingError
from reproductions.task_independence.tables import STAGES, TRACED_MODELS

CLAIM = "task_independence"
NUM_CLASSES, BATCH_SIZE = 10, 2
LARGE = ("regnet_y_128gf", "vit_h_14")  # of 640 million parameters each: one at a time
# By the size of an image in pixels: 96 where the architecture takes any.
OF_TIMM = {
    96: """
        convmixer_768_32 convnext_atto_rms cpubone_nano cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny densenet121
        dla46x_c dpn48b edgenext_xx_small efficientnet_b0 efficientvim_m1 efficientvit_b0 ese_vovnet19b_slim_dw
        fasternet_t0 fastvit_s12 focalnet_tiny_srf ghostnet_050 hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_s
        inception_next_atto inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small legacy_seresnet18
        legacy_xception lowformer_b0 mobilenetv3_small_050 mobileone_s1 mobilevit_xxs nextvit_small poolformer_s12
        pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1_0 res2net50_14w_8s resnest14d resnetv2_18 rexnet_100
        sam2_hiera_tiny selecsls42 shvit_s1 skresnet18 starnet_s050 test_mambaout test_nfnet test_resnet tiny_vit_5m_224
        tresnet_m xception41p
    """,
    160: """
        test_vit test_vit_relpos
    """,
    224: """
        cait_xxs24_224 coat_tiny coatnet_pico_rw_224 convit_tiny deit_tiny_patch16_224 efficientformer_l1
        efficientformerv2_s0 efficientvit_m0 eva02_tiny_patch14_224 gcvit_xxtiny hiera_tiny_224 levit_384_s8
        mixer_s16_224 mvitv2_tiny nest_tiny pit_s_224 sequencer2d_s swiftformer_s swin_tiny_patch4_window7_224
        swinv2_cr_tiny_224 tnt_s_legacy_patch16_224 twins_svt_small visformer_tiny vit_small_r26_s32_224
        vitamin_small_224 volo_d1_224 xcit_nano_12_p8_224
    """,
    240: """
        crossvit_tiny_240
    """,
    256: """
        eca_botnext26ts_256 swinv2_tiny_window8_256
    """,
}
# The windows of the one are made for one size; the auxiliary head of the other needs a large map.
OF_TORCHVISION_AT = {"maxvit_t": 224, "inception_v3": 299}
_SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
_T5_SIZES = {"num_layers": 4, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_heads": 4, "vocab_size": 500}
# A cache of keys and values, which training does without, is no tensor.
OF_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"n_layer": 6, "n_embd": 64, "n_head": 4, "vocab_size": 500, "use_cache": False},
        ("input_ids",),
    ),
    "BertForMaskedLM": ("BertConfig", {**_SIZES, "vocab_size": 500}, ("input_ids", "attention_mask")),
    "T5ForConditionalGeneration": (
        "T5Config",
        {**_T5_SIZES, "use_cache": False},
        ("input_ids", "decoder_input_ids"),
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**_SIZES, "vocab_size": 500, "use_cache": False}, ("input_ids",)),
    "ViTForImageClassification": ("ViTConfig", {**_SIZES, "num_labels": NUM_CLASSES}, ("pixel_values",)),
}
OF_TORCHVISION_OPTIONS = {"vit_b_16": 64, "vit_b_32": 64, "vit_l_16": 64, "vit_l_32": 64, "vit_h_14": 56}


def list_models() -> list[tuple[str, str, int]]:
    """Return library, name and image size of each model."""
    found = [("timm", name, size) for size, names in OF_TIMM.items() for name in names.split()]
    for name in torchvision.models.list_models(module=torchvision.models):
        size = OF_TORCHVISION_OPTIONS.get(name) or OF_TORCHVISION_AT.get(name, 96)
        found.append(("torchvision", name, size))
    return found + [("transformers", name, 224 if "ViT" in name else 32) for name in OF_TRANSFORMERS]


def make_inputs(library: str, name: str, size: int) -> Any:
    """Return two examples: images of a size in pixels, or texts of a number of tokens."""
    images = torch.randn(BATCH_SIZE, 3, size, size)
    if library != "transformers":
        return images
    tokens = torch.randint(500, (BATCH_SIZE, size))
    of = {"pixel_values": images, "attention_mask": torch.ones_like(tokens)}
    return {key: of.get(key, tokens) for key in OF_TRANSFORMERS[name][2]}


def build(library: str, name: str, size: int) -> nn.Module:
    """Build a model with random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how it is initialised
        if library == "timm":
            model: nn.Module = timm.create_model(name, num_classes=NUM_CLASSES)
            return model
        if library == "transformers":
            config, sizes, _ = OF_TRANSFORMERS[name]
            found: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
            return found
        options = {"image_size": size} if name in OF_TORCHVISION_OPTIONS else {}
        made: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES, **options)
        return made


def examine(case: tuple[str, str, int]) -> dict[str, Any]:
    """Return what became of one model."""
    library, name, size = case
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(library, name, size).train()
    row: dict[str, Any] = {"library": library, "model": name, "image_size": size}
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    inputs = make_inputs(library, name, size)
    plain = copy.deepcopy(model)
    try:
        layers = gpipe.as_layers(model, inputs)
    except TracingError as error:
        return row | {"refused": str(error)}
    row |= {"num_layers": len(layers), "whole": layers.leaves, "balance": measure_balance(layers, inputs)}
    return row | {"differs": find_difference(plain, layers, inputs)}


def measure_balance(layers: nn.Sequential, inputs: Any) -> dict[str, float | None]:
    """Return for each K the mean of the stages' planned seconds over that of the slowest; None for too few layers."""
    profiles = profile_layers(layers, lambda outputs, _: _main(outputs).sum(), (inputs, None))
    planned = Speed.of(ACCELERATORS["h100"], "float32").seconds(profiles)[:-1]
    seconds = [layer.forward + layer.recompute + layer.backward for layer in planned]
    found: dict[str, float | None] = {}
    for num_stages in STAGES:
        if num_stages > len(seconds):
            found[str(num_stages)] = None
            continue
        ends = [0, *itertools.accumulate(partition_layers(seconds, num_stages))]
        stages = [sum(seconds[begin:end]) for begin, end in itertools.pairwise(ends)]
        found[str(num_stages)] = sum(stages) / num_stages / max(stages)
    return found


def _main(outputs: Any) -> torch.Tensor:
    """Return the logits, of outputs that may have other tensors."""
    found: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]
    return found


def _call(model: Any, inputs: Any) -> torch.Tensor:
    is_model = isinstance(inputs, dict) and not isinstance(model, nn.Sequential)
    return _main(model(**inputs) if is_model else model(inputs))


def find_difference(plain: nn.Module, layers: Any, inputs: Any) -> str:
    """Train both on the same examples; return what is not bitwise equal, nothing where all is."""
    outputs = []
    for model in (plain, layers):
        torch.manual_seed(1)
        outputs.append(_call(model, inputs))
        outputs[-1].sum().backward()
    if not torch.equal(*outputs):
        return "outputs"
    gradients = {
        layers.names[name]: parameter.grad for name, parameter in plain.named_parameters() if name in layers.names
    }
    own = dict(layers.named_parameters(remove_duplicate=False))
    for name, gradient in gradients.items():
        if (gradient is None) != (own[name].grad is None) or (
            gradient is not None and not torch.equal(gradient, own[name].grad)
        ):
            return f"the gradient of {name}"
    state = layers.model_state_dict()
    if any(not torch.equal(state[name], value) for name, value in plain.state_dict().items()):
        return "the state"
    with torch.no_grad():
        return "" if torch.equal(_call(plain.eval(), inputs), _call(layers.eval(), inputs)) else "outputs in evaluation"


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: TRACED_MODELS.tables})
    program.parser.add_argument("--models", nargs="+", help="only these; --record then needs a folder")
    options = program.parse()
    cases = list_models()
    if options.models is not None:
        program.require_folder("the page shows all models")
        cases = [case for case in cases if case[1] in options.models]
    rows = []
    for are_large in (False, True):
        part = [case for case in cases if (case[1] in LARGE) == are_large]
        with ProcessPoolExecutor(1 if are_large else os.cpu_count(), mp_context=get_context("spawn")) as pool:
            rows += [row for row, _ in zip(pool.map(examine, part), track(part, "models"), strict=True)]
    config = {"num_classes": NUM_CLASSES, "batch_size": BATCH_SIZE}
    program.publish_record(TRACED_MODELS.make_record(config, {"models": rows}))

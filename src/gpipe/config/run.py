"""The settings of a whole run, and their registration with Hydra."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError  # noqa: TID251 - OmegaConf lets this error through

from gpipe.config.checks import ConfigError, Section, add_remedy, allowed, at_least, require, why
from gpipe.config.data import (
    DataConfig,
    ImagesConfig,
    TokensConfig,
    TranslationDataConfig,
)
from gpipe.config.folders import command_words, date_folder, job_folder, sweep_id
from gpipe.config.gate import guard_composition
from gpipe.config.model import (
    AmoebaNetConfig,
    ModelConfig,
    TimmConfig,
    TransformerLMConfig,
    TransformersConfig,
    TranslationModelConfig,
)
from gpipe.config.pipeline import LaunchConfig, PipelineConfig
from gpipe.config.training import (
    EmaConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrackingConfig,
    TrainerConfig,
)

# The data of each family of models, and what to choose for it.
_SEES: dict[type[ModelConfig], tuple[type[DataConfig], str]] = {
    AmoebaNetConfig: (ImagesConfig, "images, such as data=fashion_mnist_embedded"),
    TimmConfig: (ImagesConfig, "images, such as data=image_folder"),
    TransformerLMConfig: (TokensConfig, "tokens, such as data=text_folder"),
    TransformersConfig: (TokensConfig, "tokens, such as data=text_folder"),
    TranslationModelConfig: (TranslationDataConfig, "pairs of sentences, such as data=multilingual_embedded"),
}
TO_BE_GIVEN = "<run>"  # Hydra's own mark, ???, does not replace a value that is there


@dataclass
class RunConfig(Section):
    """All settings of a run.

    Attributes:
        name: the experiment's name, and the name of its folder in runs/.
        seed: determines weights, masks, the order of the data and augmentation.
        init_from: a run's or checkpoint's folder, or an exported file, from which all weights but the softmax layer's
            are taken (the moving averages, if it has any). A timm model takes that layer's too if the number of classes
            is the same; text models always do. Of a folder of several runs, the newest finished one counts. null draws
            the weights.
        evaluate: a run's or checkpoint's folder to evaluate instead of training; null trains.
        reproduction: the folder in reproductions/ to which a sweep adds its records; null adds them to none.
    """

    name: str = allowed(
        re.compile(r"[A-Za-z0-9][\w.-]{0,99}").fullmatch,
        "at most 100 letters, digits, and _ . - between them: it becomes a folder's name",
    )
    seed: int = at_least(0)
    init_from: str | None = MISSING
    evaluate: str | None = MISSING
    reproduction: str | None = MISSING
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    pipeline: PipelineConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    schedule: ScheduleConfig = MISSING
    ema: EmaConfig = MISSING
    trainer: TrainerConfig = MISSING
    launch: LaunchConfig = MISSING
    tracking: TrackingConfig = MISSING

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be saved, and settings that do not fit each other."""
        super().__post_init__()
        kind, such_as = _SEES.get(type(self.model), (DataConfig, ""))
        if not isinstance(self.data, kind):
            raise ConfigError(
                f"data.name is {self.data.name}, but model.family is {self.model.family}, which expects {such_as}: "
                "choose one for the other."
            )
        replicas, processes = self.launch.num_replicas, self.launch.num_processes
        if self.trainer.cuda_graphs and self.pipeline.synchronize_batch_norm and replicas > 1:
            raise ConfigError(
                "trainer.cuda_graphs is true, expected false with pipeline.synchronize_batch_norm=true and "
                f"launch.num_replicas={replicas}, whose layers exchange statistics: set one of the three."
            )
        for name in ("compile", "cuda_graphs"):
            fits = not (self.launch.device_threads and getattr(self.trainer, name))
            require(fits, "launch.device_threads", "true", f"false with trainer.{name}=true")
        stages, per_device = self.pipeline.num_stages, self.pipeline.stages_per_device
        expected = stages // per_device * replicas
        if processes not in (1, expected):
            share = "stage" if per_device == 1 else f"{per_device} stages"
            shape = f"pipeline.num_stages={stages}" + (f" / {per_device}" if per_device > 1 else "")
            raise ConfigError(
                f"launch.num_processes is {processes}, expected 1, or {expected} for one process per {share} "
                f"({shape} x launch.num_replicas={replicas}): set one of the three."
            )
        size = self.trainer.batch_size
        require(size % replicas == 0, "trainer.batch_size", size, f"a multiple of launch.num_replicas={replicas}")
        if isinstance(self.data, ImagesConfig) and self.data.mixes:
            pairs = f"a multiple of 2 x launch.num_replicas={replicas} to mix images in pairs (data.mixup, data.cutmix)"
            require(size % (2 * replicas) == 0, "trainer.batch_size", size, pairs)
        if isinstance(self.model, AmoebaNetConfig):
            self._check_microbatches(self.model.min_microbatch_size)

    def _check_microbatches(self, least: int) -> None:
        """Refuse micro-batches that leave batch norm fewer than `least` images; every mini-batch is full."""
        size, replicas = self.trainer.batch_size, self.launch.num_replicas
        num_microbatches = self.pipeline.num_microbatches
        together = replicas if self.pipeline.synchronize_batch_norm else 1
        found = smallest_microbatch(size // replicas, num_microbatches) * together
        if found < least:
            over = "on each of" if together == 1 else "over all"
            share = "set pipeline.synchronize_batch_norm=true, " if together < replicas else ""
            where = f" {over} launch.num_replicas={replicas}" if replicas > 1 else ""
            raise ConfigError(
                f"trainer.batch_size={size} makes micro-batches of {found} images{where} with "
                f"pipeline.num_microbatches={num_microbatches}, expected at least model.min_microbatch_size={least} "
                f"for batch norm: raise trainer.batch_size, {share}or lower pipeline.num_microbatches."
            )


def smallest_microbatch(num_examples: int, num_microbatches: int) -> int:
    """Return the size of the smallest micro-batch of an evenly split mini-batch."""
    return num_examples // min(num_examples, num_microbatches)


def register_schemas(settings: type[Section] = RunConfig, name: str = "run_schema") -> None:
    """Register a program's settings with Hydra, which then refuses unknown keys and wrong types while it composes.

    From then on it also refuses a configuration that names code or holds a secret of the environment.
    """
    guard_composition()
    ConfigStore.instance().store(name=name, node=settings)
    _register_parts()


@cache
def _register_parts() -> None:
    store = ConfigStore.instance()
    for base in (DataConfig, ModelConfig, OptimizerConfig):
        for kind in base.kinds():
            store.store(name=kind.__name__, node=kind)  # outside its group: --help lists the files of groups
    # What ends a sweep; named here and not in conf/, where no file may name code.
    store.store(
        group="hydra/callbacks", name="sweep_end", node={"sweep_end": {"_target_": "gpipe.programs.sweep.SweepEnd"}}
    )
    OmegaConf.register_new_resolver("times", lambda *factors: math.prod(factors), replace=True)
    for resolver in (quotient, by_size, by_name, gpus_of_job, statistics_weight, job_folder):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
    for cached in (date_folder, sweep_id, command_words):  # a sweep's jobs get the values that the sweep has
        OmegaConf.register_new_resolver(cached.__name__, cached, use_cache=True, replace=True)


def quotient(total: int | None, part: int | None) -> int:
    """Return how many whole parts fit into a total; a part of 0 counts as 1."""
    if total is None or part is None:
        raise ConfigError("a number that it is computed from is null: set that number, or this setting.")
    return total // max(1, part)


def by_size(size: int, values: Mapping[int, Any]) -> Any:
    """Return the value under the largest key that is no larger than `size`."""
    fitting = [key for key in values if key <= size]
    if not fitting:
        raise ConfigError(f"the size is {size}, expected {min(values)} or more: choose a larger one, or set the value.")
    return values[max(fitting)]


def by_name(setting: str, name: str, values: Mapping[str, Any]) -> Any:
    """Return the value under a name, which becomes that of `setting`."""
    if name not in values:
        raise ConfigError(f"{name} is none of {', '.join(values)}, from which {setting} follows: set {setting}=... .")
    return values[name]


def gpus_of_job(device: Any, num_processes: int, num_devices: int, gpus_per_node: int | None) -> int:
    """Return how many GPUs a job asks for on its node: one per process, or device of a single process; 0 on CPUs."""
    if str(getattr(device, "name", device)) == "cpu":
        return 0
    if num_processes == 1:
        return min(num_devices, gpus_per_node or num_devices)
    if num_processes > (gpus_per_node or num_processes):
        raise ConfigError(
            f"a job of {num_processes} processes (launch.num_processes) needs as many GPUs, but a node has "
            f"{gpus_per_node} (launch.gpus_per_node): correct that number, or start one torchrun per node, as the "
            "guide to many hosts says."
        )
    return num_processes


def statistics_weight(num_examples: int, batch_size: int) -> float:
    """Return the weight of a new mini-batch in batch norm's moving averages, for fine-tuning on a small data set.

    One minus the momentum max(1 - 10 / s, 0.9) of Kornblith et al. (2019), with s whole mini-batches per epoch.
    """
    return min(10 / max(1, num_examples // batch_size), 0.1)


def to_settings(composed: DictConfig) -> Any:
    """Turn what Hydra composed into a program's checked settings, once.

    Raises:
        ConfigError: a value is wrong, or a key is unknown.
    """
    refuse_added_keys(composed, "")
    try:
        return OmegaConf.to_object(composed)
    except InterpolationKeyError as error:
        raise ConfigError(
            f"{error.full_key} depends on a setting that does not exist ({why(error)}): set {error.full_key}=... ."
        ) from None
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is not set, expected a value: set {error.full_key}=... .") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {add_remedy(why(error))}") from None


def to_run(composed: DictConfig) -> RunConfig:
    """Turn what Hydra composed into the checked settings of a run; raise ConfigError as `to_settings` does."""
    if composed.init_from == TO_BE_GIVEN:
        raise ConfigError(
            "init_from is not set, expected the run or checkpoint to start from: set init_from=<folder>, or "
            "init_from=null to train from scratch."
        )
    refuse_open(composed)
    run = to_settings(composed)
    assert isinstance(run, RunConfig)
    _refuse_without_effect(run)
    return run


def _refuse_without_effect(run: RunConfig) -> None:
    """Refuse settings that would have no effect; runs that were saved with them can still be read."""
    evaluation, model = run.trainer.evaluation, run.model
    may_end = evaluation.patience is None or (evaluation.every_epochs, evaluation.every_steps) != (None, None)
    expected = "null where trainer.evaluation.every_epochs and every_steps are null"
    require(may_end, "trainer.evaluation.patience", evaluation.patience, expected)
    if isinstance(model, AmoebaNetConfig):
        is_trained = model.auxiliary_weight > 0 or not model.auxiliary_head
        require(is_trained, "model.auxiliary_weight", model.auxiliary_weight, "above 0 with model.auxiliary_head=true")


def refuse_open(composed: DictConfig) -> None:
    """Refuse settings that pipeline=auto leaves open, where nothing chooses them."""
    for key in map(str, composed.pipeline):
        if OmegaConf.is_missing(composed.pipeline, key):
            raise ConfigError(
                f"pipeline.{key} is left to the planner, which chooses for plan.py, and for train.py except with "
                f"evaluate=...: set pipeline.{key}=..., or choose another file than pipeline=auto."
            )


def refuse_added_keys(node: DictConfig, path: str) -> None:
    """Refuse what `+key=value` adds: Hydra lets that past the schema, and nothing would ever read it."""
    schema = OmegaConf.get_type(node)
    assert is_dataclass(schema)
    known = {field.name for field in fields(schema)}
    for key in map(str, node):
        if key not in known:
            raise ConfigError(f"{path}{key} is unknown, expected one of {', '.join(sorted(known))}: correct its name.")
        if is_dataclass(OmegaConf.get_type(node, key)):
            refuse_added_keys(node[key], f"{path}{key}.")


def to_plain(run: RunConfig) -> dict[str, Any]:
    """Return a run's settings as JSON-able dicts, lists, numbers and strings.

    OmegaConf could do this too, but takes a hundred times as long, because it checks everything again.
    """
    return asdict(run, dict_factory=_name_members)


def _name_members(settings: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.name if isinstance(value, Enum) else value for key, value in settings}


def to_yaml(run: RunConfig) -> str:
    """Return a run's settings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(run))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings that `to_yaml` wrote, as JSON-able values; {} if the file holds no settings."""
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError):
        return {}
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}

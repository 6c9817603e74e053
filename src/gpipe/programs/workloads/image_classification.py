"""Image classification, with AmoebaNet or any other model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from gpipe.config import AmoebaNetConfig, ConfigError, ImagesConfig, ImageTableConfig, Interpolation, OwnImagesConfig
from gpipe.config.evaluated import describe_kind
from gpipe.data import (
    BytesToPixels,
    ImageLoader,
    ImageSet,
    Mixing,
    Transform,
    count_differences,
    evaluation_transform,
    open_image_set,
    refuse_other_classes,
    training_transform,
)
from gpipe.data.images.image_set import SPLITS, ImageFiles
from gpipe.data.images.labelled_subset import split_training_images
from gpipe.durable_files import write_flushed
from gpipe.models import amoebanet_a, amoebanet_b, amoebanet_c, amoebanet_d
from gpipe.pipeline.batch_norm import convert_batch_norm
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.loss import LossFunction
from gpipe.programs.workloads.workload import Workload
from gpipe.training.evaluation import Metrics, MultiLabelMetrics
from gpipe.training.losses import ClassificationLoss, MultiLabelLoss

# The public TPU code's values, used if neither the data nor the model has its own.
_IMAGE_SIZE, _CENTER_CROP, _INTERPOLATION = 224, 0.875, Interpolation.bilinear
_AMOEBANETS = {"a": amoebanet_a, "b": amoebanet_b, "c": amoebanet_c, "d": amoebanet_d}


@dataclass(frozen=True)
class ImageClassification(Workload):
    """Any model on labelled images."""

    data: ImagesConfig
    examples = "images"

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        assert self.data.num_classes is not None  # `complete` has counted them
        return self.data.num_classes

    @property
    def has_several_labels(self) -> bool:
        """Whether an image may have several labels, or none."""
        return isinstance(self.data, ImageTableConfig) and bool(self.data.several_labels)

    @property
    def image_size(self) -> int:
        """Pixels per side."""
        return self.data.image_size or _IMAGE_SIZE

    def inputs(self, num_examples: int) -> Tensor:
        """Describe `num_examples` images on the meta device."""
        return torch.empty(num_examples, self.data.channels, self.image_size, self.image_size, device="meta")

    def targets(self, num_examples: int) -> Tensor:
        """Describe the images' classes on the meta device; for mixed images, the probabilities of the classes."""
        if self.data.mixes:
            return torch.empty(num_examples, self.num_classes, device="meta")
        return self.evaluated_targets(num_examples)

    def evaluated_targets(self, num_examples: int) -> Tensor:
        """Describe the classes of test images, which are not mixed, on the meta device."""
        if self.has_several_labels:
            return torch.empty(num_examples, self.num_classes, device="meta")
        return torch.empty(num_examples, dtype=torch.int64, device="meta")

    def loss(self) -> LossFunction:
        """Return the loss of a micro-batch."""
        return self._make_loss(0.0)

    def _make_loss(self, auxiliary_weight: float) -> LossFunction:
        kind = MultiLabelLoss if self.has_several_labels else ClassificationLoss
        return kind(self.run.trainer.label_smoothing, auxiliary_weight)

    def make_metrics(self) -> Metrics:
        """Return the metrics of an evaluation."""
        return MultiLabelMetrics() if self.has_several_labels else super().make_metrics()

    def train_loader(self, pipeline: Pipeline, *, pin_memory: bool) -> ImageLoader:
        """Return the loader of the training images; only on the first stage does it decode them.

        It drops an incomplete last mini-batch, as the public TPU code does: batch norm would normalise over few images,
        or over one. Each epoch drops other images.
        """
        run, data = self.run, self.data
        mixing = None
        if data.mixes:
            sizes = {"num_classes": self.num_classes, "image_size": self.image_size}
            mixing = Mixing(mixup=data.mixup or 0.0, cutmix=data.cutmix or 0.0, **sizes)
        return self._loader(pipeline, pin_memory=pin_memory)(
            self._sets["train"],
            run.trainer.batch_size // run.launch.num_replicas,
            self._training_transform(as_bytes=pin_memory),
            shuffle=True,
            replica_index=pipeline.job.replica_index,
            num_replicas=pipeline.job.num_replicas,
            drop_last=True,
            mixing=mixing,
        )

    def evaluation_loaders(self, pipeline: Pipeline, *, pin_memory: bool) -> dict[str, ImageLoader]:
        """Return the loaders of the evaluation images; only on the first stage do they decode them.

        Validation images come first, so that their figures choose the settings.
        """
        batch_size, transform = self.run.trainer.evaluation.batch_size, self.evaluation_transform(as_bytes=pin_memory)
        loader = self._loader(pipeline, pin_memory=pin_memory)
        evaluated = [split for split in ("valid", "test") if split in self._sets]
        return {split: loader(self._sets[split], batch_size, transform, shuffle=False) for split in evaluated}

    def _loader(self, pipeline: Pipeline, *, pin_memory: bool) -> Callable[..., ImageLoader]:
        return partial(
            ImageLoader,
            seed=self.run.seed,
            num_workers=self.data.num_workers,
            prefetch_factor=self.data.prefetch_factor,
            max_broken_images=self.data.max_broken_images,
            load_images=pipeline.is_first,
            pin_memory=pin_memory,
        )

    def keep(self, folder: Path | None) -> dict[str, str]:
        """Write the names of the classes into the run's folder, one per line, for people to read."""
        if folder is not None:
            write_flushed(folder / "classes.txt", "".join(f"{name}\n" for name in self.class_names))
        return {}

    @property
    def class_names(self) -> Sequence[str]:
        """The names of the classes by label."""
        return self._sets["train"].class_names

    def warnings(self) -> list[str]:
        """Report numbers of images and classes that differ from the paper's Table 4, and files that are left out."""
        sets, name = self._whole_sets, self.data.name
        found = [sentence for split, images in sets.items() for sentence in count_differences(name, split, images)]
        found += [
            sentence for images in sets.values() if isinstance(images, ImageFiles) for sentence in images.warnings()
        ]
        return list(dict.fromkeys(found))  # splits share classes, and may share a folder

    @cached_property
    def _whole_sets(self) -> dict[str, ImageSet]:
        return {split: self._open(split) for split in SPLITS}

    @cached_property
    def _sets(self) -> dict[str, ImageSet]:
        """The training images, any validation images, and the test images."""
        data, whole = self.data, self._whole_sets
        train, valid = split_training_images(
            data.name, whole["train"], data.max_images, data.validation_images, self.run.seed
        )
        return {"train": train, **({} if valid is None else {"valid": valid}), "test": whole["test"]}

    def _open(self, split: str) -> ImageSet:
        data = self.data
        share = data.validation_share if isinstance(data, OwnImagesConfig) else None
        image_set = open_image_set(data.name, split, data.root, share)
        refuse_other_classes(data.name, len(image_set.class_names), self.num_classes)
        if (found := image_set.labels.ndim > 1) != self.has_several_labels:
            raise ConfigError(
                f"data.root is {data.root}, whose images have {describe_kind(found)}, but the model predicts "
                f"{describe_kind(not found)}: choose a table of that kind."
            )
        return image_set

    @property
    def prepare_inputs(self) -> BytesToPixels:
        """Turns images' bytes, as which they travel to a GPU, into pixels."""
        return BytesToPixels(self.data.mean, self.data.std)

    def evaluation_transform(self, *, as_bytes: bool = False) -> Transform:
        """Return the transform of a test image; with `as_bytes`, it leaves out what `prepare_inputs` does."""
        data = self.data
        return evaluation_transform(
            self.image_size,
            channels=data.channels,
            center_crop=data.center_crop or _CENTER_CROP,
            keep_aspect=bool(data.keep_aspect),
            interpolation=data.interpolation or _INTERPOLATION,
            mean=data.mean,
            std=data.std,
            as_bytes=as_bytes,
        )

    def _training_transform(self, *, as_bytes: bool) -> Transform:
        """Return the transform of a training image before mixing, which needs pixels rather than bytes."""
        data = self.data
        return training_transform(
            self.image_size,
            channels=data.channels,
            crop_scale=None if data.crop_scale is None else (data.crop_scale[0], data.crop_scale[1]),
            crop_aspect=(data.crop_aspect[0], data.crop_aspect[1]),
            color_jitter=data.color_jitter,
            flip=data.flip,
            policy=data.policy,
            cutout=data.cutout,
            random_erasing=data.random_erasing or 0.0,
            interpolation=data.interpolation or _INTERPOLATION,
            mean=data.mean,
            std=data.std,
            as_bytes=as_bytes and not data.mixes,
        )


@dataclass(frozen=True)
class AmoebaNetClassification(ImageClassification):
    """AmoebaNet on labelled images; its loss may include an auxiliary head's."""

    model: AmoebaNetConfig
    has_batch_norm = True

    @property
    def final_drop_path(self) -> float:
        """The drop-path rate at the end of training."""
        return self.model.drop_path

    def layers(self) -> nn.Sequential:
        """Describe the whole model on the meta device."""
        with torch.device("meta"):
            layers = _AMOEBANETS[self.model.variant](
                num_classes=self.num_classes,
                image_channels=self.data.channels,
                image_size=self.image_size,
                drop_path=0.0,  # the trainer raises it step by step
                **self.model.values_but("family", "variant", "drop_path", "auxiliary_weight", "min_microbatch_size"),
            )
        convert_batch_norm(layers)
        return layers

    def loss(self) -> LossFunction:
        """Return the loss of a micro-batch."""
        model = self.model
        return self._make_loss(model.auxiliary_weight if model.auxiliary_head else 0.0)

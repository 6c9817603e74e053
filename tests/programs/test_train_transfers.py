"""Two transfers of Table 4 train past their first epoch, at a small size of the model, on sets of their true size.

With mini-batches of 256 images the last one of an epoch of Aircraft would have 11 images, that of Birdsnap 26: one or
two per micro-batch, of which the auxiliary head's batch norm would see one value.
"""

from pathlib import Path

import pytest
from hydra import compose

from gpipe.config import to_run
from gpipe.data.images.catalogue import IMAGE_SETS
from gpipe.launch.processes import Place
from gpipe.programs.build import build_layers, build_pipeline, build_tracker, build_trainer
from gpipe.programs.layout import share_layout
from tests.data.images.full_sets import WRITERS

pytestmark = pytest.mark.usefixtures("composer")
SMALL = (
    "+experiment=transfer", "init_from=null", "model.num_layers=3", "model.num_filters=8", "data.image_size=16",
    "data.num_workers=0", "pipeline.num_stages=1", "pipeline.num_microbatches=16",
    "pipeline.rematerialize=never", "launch=one_process", "trainer.batch_size=256", "launch.device=cpu",
    "trainer.autocast=none", "trainer.evaluation.every_epochs=null", "trainer.checkpoints.keep=null",
    "trainer.checkpoints.every_steps=null", "tracking=disabled",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "num_batches", "num_left"),
    [("fgvc_aircraft", 26, 11), ("birdsnap", 185, 26)],
)
def test_a_transfer_goes_on_after_the_last_mini_batch_of_an_epoch(
    tmp_path: Path, data: str, num_batches: int, num_left: int
) -> None:
    WRITERS[data](tmp_path)
    overrides = [*SMALL, f"data={data}", f"data.root={tmp_path}", f"trainer.max_steps={num_batches + 1}"]
    run = to_run(compose("train", overrides=overrides))
    layers, place = build_layers(run), Place(None, "cpu")
    pipeline = build_pipeline(run, layers, share_layout(run, layers, place), place)
    seen = []
    pipeline.layers["0"].register_forward_hook(lambda layer, inputs, output: seen.append(len(inputs[0])))
    with build_tracker(run, tmp_path, [], enabled=False) as tracker:
        trainer = build_trainer(run, pipeline, place, tmp_path, tracker, lambda timeline: None)
        assert len(trainer.train_loader) == num_batches
        assert IMAGE_SETS[data].table.num_train_images == 256 * num_batches + num_left
        pipeline.step = trainer._batch = num_batches - 1  # as if it had been resumed at the epoch's last mini-batch
        summary = trainer.train()
    assert (summary.num_steps, summary.num_epochs) == (num_batches + 1, 1)
    assert seen == [16] * 32  # two steps of 16 micro-batches

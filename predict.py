"""Classify images with a model that train.py has trained. See `--help`."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from gpipe._compat.hydra import surround_runs
from gpipe.config.literally import take_literally
from gpipe.config.predict import LITERAL, PredictConfig
from gpipe.config.run import register_schemas, to_settings
from gpipe.launch.errors import report_errors

register_schemas(PredictConfig, "predict_schema")


@hydra.main(version_base="1.3", config_path="conf", config_name="predict")
def main(composed: DictConfig) -> None:
    """Check the composed settings, then classify."""
    with report_errors(debug=composed.debug):
        settings = to_settings(composed)
        from gpipe.programs.chosen_checkpoint import choose_checkpoint

        if Path(settings.images).exists():  # if not, `start` refuses them
            choose_checkpoint("checkpoint", settings.checkpoint)  # before imports that take seconds
    from gpipe.programs.predict import start

    start(settings)


if __name__ == "__main__":
    sys.argv[1:] = take_literally(sys.argv[1:], LITERAL)
    with surround_runs(report_errors):
        main()

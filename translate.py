"""Translate a sentence or a file with a model that train.py has trained. See `--help`."""

import sys

import hydra
from omegaconf import DictConfig

from gpipe._compat.hydra import surround_runs
from gpipe.config.literally import take_literally
from gpipe.config.run import register_schemas, to_settings
from gpipe.config.translate import LITERAL, TranslateConfig
from gpipe.launch.errors import report_errors

register_schemas(TranslateConfig, "translate_schema")


@hydra.main(version_base="1.3", config_path="conf", config_name="translate")
def main(composed: DictConfig) -> None:
    """Check the composed settings, then translate."""
    with report_errors(debug=composed.debug):
        settings = to_settings(composed)
        from gpipe.programs.chosen_checkpoint import choose_checkpoint

        choose_checkpoint("checkpoint", settings.checkpoint)  # before imports that take seconds
    from gpipe.programs.translate import start

    start(settings)


if __name__ == "__main__":
    sys.argv[1:] = take_literally(sys.argv[1:], LITERAL, texts=["text"])
    with surround_runs(report_errors):
        main()

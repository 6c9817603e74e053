"""Say what a run would need and how fast it would run on hardware you do not have. See `--help`."""

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gpipe.config import register_schemas, to_run
from gpipe.config.plan import PlanConfig
from gpipe.launch.errors import report_errors
from gpipe.programs.automatic import choose_pipeline, is_open

register_schemas(PlanConfig)


@hydra.main(version_base="1.3", config_path="conf", config_name="plan")
def main(composed: DictConfig) -> None:
    """Check the composed settings, then plan."""
    with report_errors(debug=composed.launch.debug):
        if is_open(composed):
            from gpipe.programs.plan import find_devices

            composed = choose_pipeline(composed, HydraConfig.get().overrides.task, find_devices)
        plan = to_run(composed)
        assert isinstance(plan, PlanConfig)
    from gpipe.programs.plan import start

    start(plan)


if __name__ == "__main__":
    main()

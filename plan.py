"""Say what a run would need and how fast it would run on hardware you do not have. See `--help`."""

# ruff: noqa: E402

from gpipe.launch import garbage_collection

# First: plans create millions of objects, and few of them become garbage.
garbage_collection.pause()

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gpipe._compat.hydra import surround_runs
from gpipe.config import ConfigError, register_schemas, to_run
from gpipe.config.plan import PlanConfig
from gpipe.launch.errors import report_errors
from gpipe.programs.automatic import is_open

register_schemas(PlanConfig)


@hydra.main(version_base="1.3", config_path="conf", config_name="plan")
def main(composed: DictConfig) -> None:
    """Check the composed settings, then plan."""
    with report_errors(debug=composed.launch.debug):
        if composed.evaluate is not None:
            raise ConfigError(
                f"evaluate is {composed.evaluate}, expected null: plan.py plans a training; leave it out, and repeat "
                "the settings of that run."
            )
        plan = None if is_open(composed) else to_run(composed)
        if plan is not None and plan.num_devices is not None:
            raise ConfigError(
                f"num_devices is {plan.num_devices}, expected null without pipeline=auto: set pipeline=auto, or give "
                "the number of devices by pipeline.num_stages and launch.num_replicas."
            )
        from gpipe.programs.plan import choose, start

        plan = plan or choose(composed, HydraConfig.get().overrides.task)
        assert isinstance(plan, PlanConfig)
    start(plan)


if __name__ == "__main__":
    with surround_runs(report_errors):
        main()

"""The paper's claim that any network that is a sequence of layers can be scaled, on models that nobody here wrote."""

from collections.abc import Sequence

from gpipe.records import Record
from reproductions.claims import NO_TEST, NOT_RUN, Claim
from reproductions.study import Study
from reproductions.table import Paper, markdown, newest

STAGES = (2, 4, 8)
PLANNED_STAGES = (1, 2, 4, 8)
TRACED_MODELS, TRACED_SPEED = Study("traced_models"), Study("traced_speed")
PLANNED_MODELS = Study("planned_models")


def claims(records: Sequence[Record], paper: Paper) -> list[Claim]:  # noqa: ARG001 - every page's claims take both
    """Return the share of architectures that become layers with the same bits."""
    found = newest(records, TRACED_MODELS.experiment)
    measured = NOT_RUN
    if found is not None:
        models = found.results["models"]
        exact = [model for model in models if model.get("differs") == ""]
        measured = f"{len(exact)} of {len(models)} architectures become layers with the same bits"
    text = "any network that is a sequence of layers (abstract), here models that are not written as sequences"
    return [Claim(text, "any", measured, verdict=NO_TEST)]


@TRACED_MODELS.table
def traced_share(record: Record) -> str:
    """Return how many models of each library became layers, and how many of those have the same bits."""
    rows = []
    for library in ("timm", "torchvision", "transformers"):
        models = [model for model in record.results["models"] if model["library"] == library]
        traced = [model for model in models if "refused" not in model]
        exact = [model for model in traced if model["differs"] == ""]
        rows.append([library, *(len(part) for part in (models, traced, exact))])
    return markdown(["library", "architectures", "became layers", "same bits"], rows)


@TRACED_MODELS.table
def traced_models(record: Record) -> str:
    """Return each architecture, the number of layers, whether it has the same bits, and the balance, or why none."""
    rows = []
    for model in record.results["models"]:
        name = f"{model['library']}: {model['model']}"
        if "refused" in model:
            where, _, _ = model["refused"].partition(": ")[2].partition("; ")
            rows.append([name, "refused", f"`{where}`", *[""] * len(STAGES)])
            continue
        same = f"no: {model['differs']}" if model["differs"] else "yes"
        balances = [model["balance"][str(k)] for k in STAGES]
        shown = ["" if balance is None else f"{balance:.0%}" for balance in balances]
        rows.append([name, model["num_layers"], same, *shown])
    return markdown(["model", "layers", "same bits", *(f"balance, K = {k}" for k in STAGES)], rows)


@TRACED_SPEED.table
def traced_speed(record: Record) -> str:
    """Return what the layers cost beside the plain model, and what a second stage gains."""
    rows = [
        [
            model["model"],
            model["schedule"],
            *(f"{model['seconds'][name]:.3f}" for name in ("plain", "ours", "one_stage", "stages")),
            f"{model['cost']:.3f}",
            f"{model['speedup']:.2f}",
        ]
        for model in record.results["models"]
    ]
    heads = ["plain loop, s", "K = 1 beside it, s", "K = 1 alone, s", "K = 2, s", "layers over plain", "K = 2 gains"]
    return markdown(["model", "schedule", *heads], rows)


@PLANNED_MODELS.table
def planned_models(record: Record) -> str:
    """Return the planned speed and the fullest device's memory of well-known models, for each K."""
    rows = []
    for model in record.results["models"]:
        plans = [model["plans"][str(k)] for k in PLANNED_STAGES]
        cells = [f"{plan['images_per_second']:,.0f}; {plan['peak_bytes'] / 2**30:.1f} GiB" for plan in plans]
        rows.append([model["model"], f"{model['parameters'] / 1e6:.0f}M", model["image_size"], *cells])
    return markdown(["model", "parameters", "pixels", *(f"images/s; peak, K = {k}" for k in PLANNED_STAGES)], rows)


TABLES = (*TRACED_MODELS.tables, *TRACED_SPEED.tables, *PLANNED_MODELS.tables)

"""How the pictures of all notebooks look: their format, their colours, and what stands around them."""

from enum import StrEnum, unique
from typing import Any

import matplotlib.pyplot as plt
from IPython import display as page
from matplotlib_inline.backend_inline import set_matplotlib_formats

from gpipe.pipeline.schedule import Kind
from gpipe.planning.picture import COLORS

PAPER_ALONE = "the paper's points alone: none of them was run here"


@unique
class Color(StrEnum):
    """One colour for each meaning, and no meaning with two; Python refuses a colour that comes twice."""

    FORWARD, RECOMPUTATION, BACKWARD = (COLORS[kind] for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD))
    COMPUTING = "#5b7f6f"  # forwards and backwards together
    BUBBLE = "#d5d5d5"
    IMBALANCE = "#b5739d"
    TRANSFER = "#e0a458"
    UPDATE = "#5d6873"
    K1, K2, K4, K8 = "#c9b8d8", "#a07cc0", "#74489e", "#43206b"
    PARAMETERS = "#35618f"
    BOUNDARY_INPUTS = "#41ae99"
    ALL_KEPT = "#bdbdbd"
    ACTIVATIONS = "#e08a5b"
    ACTIVATIONS_M16, ACTIVATIONS_M128, ACTIVATIONS_FUSED = "#f2c9b4", "#9c4a1f", "#6f6f2a"
    LIMIT = "#b0413e"
    BELOW_LIMIT = "#60666c"
    GPIPE, ONE_F_ONE_B, INTERLEAVED = "#2f6f9f", "#b8860b", "#4f8a3c"
    SPLIT_GPIPE, ZB_H1, ZB_V = "#7fb2d6", "#d98b4a", "#8a5a9e"
    AMOEBANET, TRANSFORMER = "#2b7a78", "#c2603a"
    CUT_BY_FLOPS, CUT_BY_SECONDS = "#a5661a", "#1f5fa8"
    BUBBLE_LAW, EARLY_LAW = "#cccccc", "#808080"
    BATCH_FITS, BATCH_GROWS, BATCH_EQUAL = "#3d7ea6", "#d1a12d", "#6d9b52"
    FROM_SCRATCH, FINE_TUNED = "#96750f", "#4577a9"
    TRAINING = "#4a76a6"
    SETTING_1, SETTING_2, SETTING_3 = "#4b74a3", "#c4622d", "#5a9367"
    PLANNED_COST = "#7b9b59"
    MULTILINGUAL, BILINGUAL = "#4676a5", "#94730d"
    LOW_RESOURCE, HIGH_RESOURCE = "#2c6e49", "#c8553d"
    SCALED_AND_CLIPPED, SCALED, CLIPPED, NEITHER = "#4775a4", "#6a994e", "#bc8a00", "#a8484e"
    PAPER = "#333333"
    FAINT = "#696969"


def use_house_style() -> None:
    """Draw pictures as SVG, the same in every execution, in the style of all notebooks."""
    set_matplotlib_formats("svg", metadata={"Date": None})
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gpipe"})
    plt.rcParams["font.sans-serif"] = ["DejaVu Sans", "Arial"]  # a picture names them in each of its texts
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    plt.rcParams.update({"axes.titlelocation": "left", "axes.titlesize": 10, "hatch.linewidth": 0.7})


def show(*paragraphs: str) -> None:
    """Show Markdown: each argument is a paragraph or a table."""
    page.display(page.Markdown("\n\n".join(paragraphs)))


def draw_legend_above(figure: plt.Figure, axis: plt.Axes, **style: Any) -> None:
    """Put the legend of one axis above the figure."""
    handles, labels = axis.get_legend_handles_labels()
    unique_handles = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique_handles.values(), unique_handles.keys(), loc="outside upper left", ncols=style.pop("ncols", 6), **style
    )

"""The pictures of the first notebook: timelines, bubbles, and what stages hold."""

from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
from house_style import Color
from IPython.display import SVG

from gpipe.pipeline.schedule import Kind, Rematerialize
from gpipe.pipeline.schedule import gpipe as gpipe_schedule
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.picture import plot
from gpipe.planning.simulation import simulate

MINI_BATCH_SECONDS = {Kind.FORWARD: 0.008, Kind.RECOMPUTE: 0.008, Kind.BACKWARD: 0.016}


def simulate_step(
    num_stages: int, num_microbatches: int, rematerialize: Rematerialize = Rematerialize.NEVER
) -> Timeline:
    """Simulate a step of equal stages."""
    schedule = gpipe_schedule(num_stages, num_microbatches, rematerialize)
    return simulate(schedule, lambda task: MINI_BATCH_SECONDS[task.kind] / num_microbatches)


def simulate_split_steps(num_devices: int, num_microbatches: int) -> dict[str, Timeline]:
    """Simulate schedules whose stages take a unit for each of the three parts of a micro-batch."""
    found = {}
    for name in ("1f1b", "split_gpipe", "zb_h1", "zb_v"):
        per_device = 2 if name == "zb_v" else 1
        schedule = SCHEDULES[name](num_devices * per_device, num_microbatches, Rematerialize.NEVER, per_device)
        seconds = 0.001 / per_device
        found[name] = simulate(
            schedule, lambda task, seconds=seconds: seconds * (2 if task.kind is Kind.BACKWARD else 1)
        )
    return found


def draw(timelines: dict[str, Timeline]) -> SVG:
    """Draw timelines below each other, on one scale."""
    with TemporaryDirectory() as folder:
        picture = Path(folder) / "timelines.svg"
        plot(timelines, picture)
        return SVG(picture.read_text("utf-8"))


def compute_bubble(num_stages: int, num_microbatches: float, rematerialize: Rematerialize) -> float:
    """Compute the bubble of equal stages whose backward pass takes twice as long as the forward pass."""
    work = num_microbatches * (4 / 3 if rematerialize is Rematerialize.ALWAYS else 1)
    return (num_stages - 1) / (work + num_stages - 1)


COUNTS = [1, 2, 4, 8, 16, 32, 64]
STYLES = {Rematerialize.NEVER: ("-", "o", "all kept"), Rematerialize.ALWAYS: ("--", "D", "re-materialised, early")}


def draw_bubbles(axis: plt.Axes, num_stages: int, color: str) -> None:
    """Draw the law as lines and simulated steps as points, and check that they agree."""
    for mode, (line, marker, _) in STYLES.items():
        laws = [compute_bubble(num_stages, count, mode) for count in COUNTS]
        bubbles = [simulate_step(num_stages, count, mode).bubble for count in COUNTS]
        assert max(abs(bubble - law) for bubble, law in zip(bubbles, laws, strict=True)) < 1e-9
        axis.plot(COUNTS, [100 * bubble for bubble in bubbles], marker, color=color, markersize=5)
        fine = [2 ** (exponent / 20) for exponent in range(121)]
        axis.plot(fine, [100 * compute_bubble(num_stages, count, mode) for count in fine], line, color=color)
    ring = 100 * compute_bubble(num_stages, 4 * num_stages, Rematerialize.NEVER)
    axis.plot(4 * num_stages, ring, "o", color=color, markersize=13, fillstyle="none")
    top = 100 * compute_bubble(num_stages, 1, Rematerialize.NEVER)
    axis.text(0.93, top, f"K = {num_stages}", color=color, ha="right", va="center")


def draw_held(axis: plt.Axes, labels: list[str], held: list[tuple[int, int]], left: float, width: float) -> None:
    """Draw bars of megabytes, their boundary inputs below."""
    positions = [index + left for index in range(len(held))]
    inputs, others = [part / 1e6 for _, part in held], [(total - part) / 1e6 for total, part in held]
    axis.bar(positions, inputs, width, color=Color.BOUNDARY_INPUTS, label="boundary inputs")
    axis.bar(positions, others, width, bottom=inputs, color=Color.ACTIVATIONS, label="activations, re-materialised")
    axis.set_xticks(range(len(held)), labels)
    axis.set_ylabel("held at once, MB")


def draw_all_bubbles() -> None:
    """Draw the bubble against M for three numbers of stages."""
    _, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for num_stages, color in ((8, Color.K8), (4, Color.K4), (2, Color.K2)):
        draw_bubbles(axis, num_stages, color)
    for line, marker, label in STYLES.values():
        axis.plot([], [], line + marker, color="gray", markersize=5, label=label)
    axis.plot([], [], "o", color="gray", markersize=13, fillstyle="none", label="M = 4K")
    axis.set_xscale("log", base=2)
    axis.set_xticks(COUNTS, [str(count) for count in COUNTS])
    axis.set_xlim(0.7, 70)
    axis.set_ylim(0, 100)
    axis.set_xlabel("M, micro-batches per mini-batch")
    axis.set_ylabel("bubble, % of the devices' time")
    axis.legend()
    plt.show()


def draw_losses(losses: list[float], correct: float) -> None:
    """Draw the loss of each step; correct: the share of test photographs that are right in the end."""
    _, axis = plt.subplots(figsize=(9, 2.8), layout="constrained")
    axis.plot(losses, color=Color.TRAINING)
    axis.set_xlabel("step")
    axis.set_ylabel("cross-entropy, nats")
    axis.set_ylim(0)
    right = f"after {len(losses)} steps {correct:.0%} of 1,000 test photographs are right"
    axis.set_title(f"loss of each mini-batch; {right}", loc="left", fontsize=10)
    plt.show()


def draw_all_held(
    kept: list[tuple[int, int]], recomputed: dict[int, list[tuple[int, int]]], num_microbatches: int
) -> None:
    """Draw what the stages hold, with and without re-materialisation, and what stage 1 holds against M."""
    _, (by_stage, by_count) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    positions, all_kept = [stage - 0.2 for stage in range(len(kept))], [total / 1e6 for total, _ in kept]
    by_stage.bar(positions, all_kept, 0.36, color=Color.ALL_KEPT, label="all kept")
    draw_held(by_stage, [str(stage) for stage in range(len(kept))], recomputed[num_microbatches], 0.2, 0.36)
    by_stage.set_xlabel("stage")
    by_stage.set_title(f"each stage, M = {num_microbatches}", loc="left", fontsize=10)
    by_stage.legend()
    draw_held(by_count, [str(count) for count in recomputed], [held[1] for held in recomputed.values()], 0, 0.6)
    by_count.axhline(all_kept[1], color="gray", linewidth=1)
    by_count.text(len(recomputed) - 0.6, all_kept[1], "all kept", color="gray", ha="right", va="bottom")
    by_count.set_xlabel("M, micro-batches per mini-batch")
    by_count.set_title("stage 1", loc="left", fontsize=10)
    plt.show()

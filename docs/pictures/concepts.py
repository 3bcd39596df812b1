"""Draws the pictures of the concepts, as SVG: python docs/pictures/concepts.py. All numbers in them are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_amp as fa

HERE = Path(__file__).parent
BLUE, ORANGE, GREEN, GREY, RED = "#4051b5", "#e07a1f", "#2e8b57", "#888888", "#c0392b"
WIDTH = 5.2  # inches: on a phone's screen the letters stay readable


def box(
    ax: Axes, x: float, y: float, text: str, color: str, width: float = 2.0, height: float = 0.9, **how: Any
) -> None:
    """A rounded box around a text, by its centre."""
    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0.02,rounding_size=0.12",
        facecolor=color + "22",
        edgecolor=color,
        linewidth=1.2,
        linestyle=how.pop("linestyle", "-"),
    )
    ax.add_patch(shape)
    ax.text(x, y, text, ha="center", va="center", fontsize=how.pop("fontsize", 9), **how)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", **how: Any) -> None:
    style = {
        "arrowstyle": "-|>",
        "color": how.get("color", "black"),
        "linewidth": 1.2,
        "linestyle": how.get("linestyle", "-"),
    }
    ax.annotate("", xy=end, xytext=start, arrowprops=style)
    if text:
        x, y = (start[0] + end[0]) / 2 + how.get("dx", 0), (start[1] + end[1]) / 2 + how.get("dy", 0.12)
        ax.text(x, y, text, ha=how.get("ha", "center"), va="bottom", fontsize=8.5, family="monospace")


def canvas(height: float, right: float, top: float) -> tuple[Any, Axes]:
    figure, ax = plt.subplots(figsize=(WIDTH, height))
    ax.set(xlim=(0, right), ylim=(0, top))
    ax.axis("off")
    return figure, ax


def saved(figure: Any, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def units() -> None:
    """Two micro-batches made with different scales and weights: the sum, the clipped sum, the update."""

    def loss_fn(params: Tensor, batch: tuple[float, float]) -> fa.Loss:
        slope, weight = batch
        return fa.Loss(slope * params, weight=weight)

    def shown(grads: fa.ScaledGrads) -> str:
        meant = fa.unscale(grads).grads
        return f"tree {grads.tree:g}\nscale {grads.scale:g}, weight {grads.weight:g}\nmeans {meant:g}"

    params = torch.tensor(1.0)
    first = fa.scale_backward(loss_fn, fa.StaticScale(8.0), params, (0.5, 1.0)).grads
    second = fa.scale_backward(loss_fn, fa.StaticScale(4.0), params, (1.5, 3.0)).grads
    total = fa.accumulate(first, second)
    clipped = fa.clip(total, 0.625).grads
    updated, _ = fa.maybe_step(fa.sgd(1.0), params, fa.sgd(1.0).init(params), clipped, fa.all_finite(clipped))

    figure, ax = canvas(4.6, 6, 6.2)
    box(ax, 1.5, 5.5, shown(first), BLUE, 2.5, 1.1)
    box(ax, 4.5, 5.5, shown(second), BLUE, 2.5, 1.1)
    arrow(ax, (1.5, 4.93), (2.6, 4.25))
    arrow(ax, (4.5, 4.93), (3.4, 4.25))
    ax.text(3, 4.55, "accumulate", ha="center", fontsize=8.5, family="monospace")
    box(ax, 3, 3.65, shown(total), GREEN, 2.6, 1.1)
    arrow(ax, (3, 3.08), (3, 2.5), "clip to 0.625", dx=0.15, dy=-0.12, ha="left")
    box(ax, 3, 1.9, shown(clipped), ORANGE, 2.6, 1.1)
    ax.text(4.45, 1.9, "the same tree:\nonly the scale\nhas changed", fontsize=8, color=GREY, va="center")
    arrow(ax, (3, 1.33), (3, 0.72), "maybe_step", dx=0.15, dy=-0.12, ha="left")
    box(ax, 3, 0.35, f"parameter {params:g} becomes {updated:g}", GREY, 3.0, 0.6)
    saved(figure, "units")


def skips() -> None:
    """A run whose gradients fit up to a scale of 2**11: the scale, and a parameter that skips do not touch."""

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (params["w"].half() * x).sum()  # the gradient, 20, passes through float16

    optimizer = fa.sgd(1e-3)
    step = fa.make_step(loss_fn, optimizer)
    state = fa.init_state({"w": torch.ones(1)}, optimizer, fa.DynamicScale(2.0**14, growth_interval=8))
    scales, weights, skipped = [], [], []
    for window in range(40):
        state, metrics = step(state, [torch.full((1,), 20.0, dtype=torch.float16)])
        scales.append(float(metrics.scale.log2()))
        weights.append(float(state.params["w"]))
        if not metrics.applied:
            skipped.append(window)

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(WIDTH, 3.4), sharex=True)
    top.step(range(40), scales, where="mid", color=BLUE)
    top.plot(skipped, [scales[i] for i in skipped], "x", color=RED, label="skipped")
    top.set(ylabel="log2 of the scale", yticks=range(11, 15))
    top.legend(frameon=False, fontsize=9)
    bottom.plot(weights, color=GREEN, drawstyle="steps-mid")
    bottom.plot(skipped, [weights[i] for i in skipped], "x", color=RED)
    bottom.set(ylabel="a parameter", xlabel="window")
    for ax in (top, bottom):
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    saved(figure, "skips")


def windows() -> None:
    """Seven micro-batches of different lengths in windows of three, and what each of them counts."""
    tokens = [90, 20, 50, 70, 80, 30, 60]
    figure, ax = canvas(2.7, 100, 4.4)
    for row, window in enumerate(fa.windows(tokens, 3)):
        window, x, y = list(window), 18.0, 3.6 - 1.35 * row
        ax.text(0, y, f"window {row + 1}", va="center", fontsize=9)
        for count in window:
            width = 78 * count / sum(window)
            ax.barh(y, width - 0.8, left=x, height=0.62, color=BLUE, alpha=0.25 + 0.6 * count / 90)
            ax.text(x + width / 2, y, f"{count}", ha="center", va="center", fontsize=9)
            ax.text(
                x + width / 2, y - 0.5, f"{count / sum(window):.0%}", ha="center", va="center", fontsize=8, color=GREY
            )
            x += width
    ax.text(57, 4.2, "tokens of each micro-batch, and its share in the gradient", ha="center", fontsize=9)
    saved(figure, "windows")


def purity() -> None:
    """The same step twice: with a state of its own for each result, and with one memory."""
    figure, ax = canvas(3.5, 7.2, 4.6)
    ax.text(0.2, 4.3, "pure: both states are there", fontsize=9.5, weight="bold")
    box(ax, 1.3, 3.5, "state", BLUE)
    box(ax, 5.9, 3.5, "next state", GREEN)
    arrow(ax, (2.4, 3.5), (4.8, 3.5), "step")
    ax.text(3.6, 3.15, "replay, compare", ha="center", fontsize=8, color=GREY)

    ax.text(0.2, 2.25, "donate=True: one memory", fontsize=9.5, weight="bold")
    box(ax, 1.3, 1.4, "state\n(given away)", GREY, linestyle="--")
    box(ax, 5.9, 1.4, "next state", GREEN)
    arrow(ax, (2.4, 1.55), (4.8, 1.55), "step")
    arrow(ax, (4.8, 1.2), (2.4, 1.2), color=RED, linestyle="--")
    ax.text(3.6, 0.75, "an exception gives it back", ha="center", fontsize=8, color=RED)
    ax.text(1.3, 0.55, "reading it raises", ha="center", fontsize=8, color=GREY)
    saved(figure, "purity")


def dtypes() -> None:
    """The gradients of a small network beside what float16 can hold, without a scale and with one of 2**14."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    apply, params, _ = fa.from_module(model)
    batch = torch.randn(256, 16), torch.randint(10, (256,))

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return 1e-4 * cross_entropy(apply(params, batch[0]), batch[1])

    figure, ax = plt.subplots(figsize=(WIDTH, 3.3))
    for scale, color, label in [(1.0, ORANGE, "no scale"), (2.0**14, BLUE, "scale 2**14")]:
        grads = fa.scale_backward(loss_fn, fa.StaticScale(scale), params, batch).grads.tree
        sizes = torch.cat([grad.flatten() for grad in grads.values()]).abs()
        ax.hist(sizes[sizes > 0].log2().tolist(), bins=range(-40, 18), color=color, alpha=0.6, label=label)
    tallest = ax.get_ylim()[1]
    ax.axvspan(-40, -25, color=RED, alpha=0.12, linewidth=0)
    ax.axvspan(-25, -14, color=GREY, alpha=0.15, linewidth=0)
    ax.axvspan(16, 20, color=RED, alpha=0.12, linewidth=0)
    for x, text in [(-32.5, "becomes 0"), (-19.5, "few digits"), (1, "exact to 3 digits"), (18, "inf")]:
        ax.text(x, 1.13 * tallest, text, ha="center", fontsize=8.5)
    ax.set(xlim=(-40, 20), ylim=(0, 1.25 * tallest), xlabel="log2 of a gradient, in float16", yticks=[])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9, loc="center right")
    saved(figure, "dtypes")


def backends() -> None:
    """Who differentiates the loss."""
    figure, ax = canvas(3.6, 6.4, 4.9)
    box(ax, 3.2, 4.45, 'backend="auto"', BLUE, 2.4, 0.7)
    box(ax, 3.2, 3.15, "can torch.func\ndifferentiate this loss?", GREY, 2.9, 1.0)
    arrow(ax, (3.2, 4.08), (3.2, 3.68), "the first call tries", dx=0.15, dy=-0.1, ha="left")
    arrow(ax, (2.2, 2.63), (1.4, 1.85), "yes", dx=-0.3)
    arrow(ax, (4.2, 2.63), (5.0, 1.85), "no", dx=0.3)
    box(ax, 1.4, 1.3, "torch.func\ncomposes with vmap,\ngrad, one graph", GREEN, 2.5, 1.1)
    box(ax, 5.0, 1.3, "the autograd engine\ncheckpoints, custom\nFunctions, weight cache", ORANGE, 2.7, 1.1)
    arrow(ax, (2.7, 1.3), (3.6, 1.3))
    arrow(ax, (3.6, 1.3), (2.7, 1.3))
    ax.text(3.2, 0.45, "the same values, within one rounding", ha="center", fontsize=8.5, color=GREY)
    saved(figure, "backends")


def main() -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "functional_amp"
    for draw in (units, skips, windows, purity, dtypes, backends):
        draw()


if __name__ == "__main__":
    main()

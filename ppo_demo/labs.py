"""The book's labs: what each computes over its grid, and what it draws."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from ppo_demo import bandit
from ppo_demo.explorer import Channels, Explorer, Floats, Readout, Slider
from ppo_demo.figures import COLORS, INK, WIDTH, new_figure, style
from ppo_demo.surrogates import Clip

if TYPE_CHECKING:  # it needs PyTorch, which the other labs can do without
    from ppo_demo.lm.results import Sweep

CLIP_RANGES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)


def policy_update_lab() -> Explorer:
    """Lab A: how the policy ratio of the two-action policy evolves over the mini-batches.

    Returns
    -------
    Explorer
        Over 17 learning rates, 8 clip ranges and 8 KL weights. ``numbers`` holds the final
        ratios ``ppo`` and ``plain``; ``curves`` the ratio after each update.
    """
    return Explorer(
        name="lab-a",
        title="Policy Update Lab A: the policy-update playground",
        sliders=[
            Slider("learning_rate", LEARNING_RATES, 0.08, "Learning rate"),
            Slider("clip_range", (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5), 0.2, "Clip range ε"),
            Slider("kl_weight", (0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10), 0.01, "KL weight β"),
        ],
        compute=_policy_update,
        draw=_draw_policy_update,
        readouts=[
            Readout("Final policy ratio", "{ppo:.2f} (clipped) vs {plain:.2f} (unclipped)"),
        ],
        alt=(
            "Top: policy ratio of jump after each of 12 updates. The blue curve is the plain "
            "policy gradient, the green one PPO; the band marks 1 minus ε to 1 plus ε, a line "
            "marks 1. Bottom: an arcade track seen from the side, with a blue bot and a green "
            "bot at their final ratios. The green bot runs between two bumpers and hangs on a "
            "cord to the reference console at 1."
        ),
        table=[
            {"learning_rate": 0.01},
            {"learning_rate": 0.32},
            {"learning_rate": 0.32, "clip_range": 0.05},
            {"learning_rate": 0.32, "kl_weight": 3},
            {"learning_rate": 2.6, "kl_weight": 0},
            {"learning_rate": 1.3, "kl_weight": 10},
        ],
    )


def clipping_lab() -> Explorer:
    """Lab B: the unclipped and the clipped objective against the policy ratio.

    Returns
    -------
    Explorer
        Over 51 ratios, 41 advantages and 10 clip ranges. ``numbers`` holds ``unclipped``,
        ``clipped_ratio`` and ``objective`` at the chosen ratio.
    """
    return Explorer(
        name="lab-b",
        title="Lab B: clipping intuition",
        sliders=[
            Slider("ratio", _steps(0, 2.5, 0.05), 1.3, "Policy ratio r"),
            Slider("advantage", _steps(-2, 2, 0.1), 0.8, "Advantage A"),
            Slider("clip_range", CLIP_RANGES, 0.2, "Clip range ε"),
        ],
        compute=_clipping,
        draw=_draw_clipping,
        readouts=[
            Readout("Unclipped objective, r × A", "{unclipped:.3f}"),
            Readout("Clipped ratio", "{clipped_ratio:.3f}"),
            Readout("PPO objective", "{objective:.3f}"),
        ],
        alt=(
            "Top: the objective against the policy ratio. The blue line is ratio times "
            "advantage; the green one is PPO's objective, which follows it and turns flat where "
            "the ratio has left the band on the side that the advantage favours. A dot on each "
            "marks the chosen ratio. Bottom: an arcade track with the bot at the chosen ratio, "
            "two bumpers at 1 minus ε and 1 plus ε, a cord to the reference console at 1, and "
            "an arrow for the push that is left; at the bumper it is gone."
        ),
        table=[
            {"ratio": 0.7},
            {"advantage": -0.8},
            {"ratio": 0.7, "advantage": -0.8},
            {"clip_range": 0.4},
            {"ratio": 2.5, "advantage": -2},
        ],
    )


def training_lab(sweep: "Sweep") -> Explorer:
    """Lab C: real training runs over learning rate, clip range and KL weight.

    Parameters
    ----------
    sweep : Sweep
        From `ppo_demo.lm.results.load`.

    Returns
    -------
    Explorer
        Over the sweep's grid and the metric shown. ``curves`` holds the mean over seeds of each
        metric and its spread, ``numbers`` the lowest and highest end of the seeds.
    """
    metrics = list(METRICS)
    return Explorer(
        name="lab-c",
        title="Lab C: real training runs",
        sliders=[
            Slider("learning_rate", sweep.learning_rates, 1e-3, "Learning rate"),
            Slider("clip_range", sweep.clip_ranges, 0.2, "Clip range ε"),
            Slider("kl_weight", sweep.kl_weights, 0.05, "KL weight β"),
            Slider(
                "metric",
                range(len(metrics)),
                metrics.index("gold"),
                "Curve",
                names=[METRICS[name]["short"] for name in metrics],
            ),
        ],
        compute=partial(_training, sweep),
        draw=partial(_draw_training, sweep),
        readouts=[
            Readout("Gold reward at the end", "{gold_low:.2f} to {gold_high:.2f}"),
            Readout("Reward model's score", "{reward_low:.2f} to {reward_high:.2f}"),
            Readout("KL, nats a completion", "{kl_low:.1f} to {kl_high:.1f}"),
        ],
        alt=(
            "Top: a metric of the chosen training run over 60 batches, the mean of the seeds as "
            "a line and their spread as a band. Bottom: every run of the sweep as a dot, its gold "
            "reward at the end against its KL divergence from the reference. Green dots have "
            "learned, pink ones ended below where they began; a thin line joins the best. Blue "
            "rings mark the seeds of the chosen run."
        ),
        table=[
            {"learning_rate": 1e-4},
            {"learning_rate": 1e-2},
            {"learning_rate": 3e-2},
            {"kl_weight": 0},
            {"kl_weight": 1},
            {"learning_rate": 3e-2, "clip_range": 0.05, "kl_weight": 1},
        ],
    )


def _steps(low: float, high: float, step: float) -> tuple[float, ...]:
    count = round((high - low) / step)
    return tuple(round(low + i * step, 10) + 0.0 for i in range(count + 1))  # no -0.0


LEARNING_RATES = tuple(float(f"{0.08 * 2 ** (k / 2):.2g}") for k in range(-6, 11))
"""0.01 to 2.6, half an octave apart, to two digits."""


def _policy_update(learning_rate: Floats, clip_range: Floats, kl_weight: Floats) -> Channels:
    ppo = bandit.simulate(learning_rate, clip_range, kl_weight)
    plain = bandit.simulate(learning_rate)
    updates = np.arange(bandit.UPDATES + 1.0)[None, None, None]
    final, plain_final = ppo[..., -1], plain[..., -1]
    return Channels(
        curves={
            "band": _band(clip_range, 0.0, bandit.UPDATES, horizontal=True),
            "plain": (updates, plain),
            "ppo": (updates, ppo),
            "cord": _cord(final),
        },
        moves={
            "plain-bot": (plain_final, np.full((1, 1, 1), PLAIN_LANE)),
            "ppo-bot": (final, np.zeros((1, 1, 1))),
            **_bumpers(clip_range),
        },
        numbers={"ppo": final, "plain": plain_final},
        widths={"cord": 1.2 + 1.3 * np.log10(1 + 100 * kl_weight)},
    )


def _clipping(ratio: Floats, advantage: Floats, clip_range: Floats) -> Channels:
    objective = Clip(clip_range)(ratio, advantage)
    unclipped = Clip(np.full((1, 1, 1), np.inf))(ratio, advantage)
    # Both objectives are straight between these ratios, so they are exact.
    ends = np.zeros_like(clip_range)
    bends = np.stack([ends, 1 - clip_range, 1 + clip_range, ends + MAX_RATIO], axis=-1)
    far = np.asarray([0.0, MAX_RATIO])[None, None, None]
    a, eps = advantage[..., None], clip_range[..., None]
    # What is left of the push: the slope of the objective, the advantage unless clipped.
    push = np.where(objective == unclipped, advantage, 0.0)
    return Channels(
        curves={
            "band": _band(clip_range, -5.0, 5.0, horizontal=False),
            "unclipped": (far, Clip(np.inf)(far, a)),
            "objective": (bends, Clip(eps)(bends, a)),
            "cord": _cord(ratio),
            "push": _arrow(ratio, push),
        },
        moves={
            "unclipped-dot": (ratio, unclipped),
            "objective-dot": (ratio, objective),
            "ppo-bot": (ratio, np.zeros((1, 1, 1))),
            **_bumpers(clip_range),
        },
        numbers={
            "unclipped": unclipped,
            "clipped_ratio": np.clip(ratio, 1 - clip_range, 1 + clip_range),
            "objective": objective,
        },
    )


# The arcade picture. Its vertical unit is that of the ratio, so shapes keep their proportions.

MAX_RATIO = 2.5
TRACK_WIDTH = 360.0
"""Of the track, in SVG units; it shows ratios from 0 to `MAX_RATIO`, and a little beyond."""
PLAIN_LANE = 0.42
"""Height of the upper lane, where the bot of the plain policy gradient runs."""
BODY = 0.11
"""Half the width of a bot."""


def _band(
    clip_range: Floats, start: float, stop: float, *, horizontal: bool
) -> tuple[Floats, Floats]:
    """Corners of the region from 1 − ε to 1 + ε."""
    low, high = 1 - clip_range, 1 + clip_range
    across = np.stack([low, low, high, high], axis=-1)
    along = np.asarray([start, stop, stop, start])[None, None, None]
    return (along, across) if horizontal else (across, along)


def _bumpers(clip_range: Floats) -> dict[str, tuple[Floats, Floats]]:
    """Places of the two bumpers; the bot's side touches one when its middle is at 1 ± ε."""
    ground = np.zeros((1, 1, 1))
    return {
        "low-bumper": (1 - clip_range - BODY, ground),
        "high-bumper": (1 + clip_range + BODY, ground),
        "low-label": (1 - clip_range - BODY, ground),
        "high-label": (1 + clip_range + BODY, ground),
    }


def _cord(ratio: Floats) -> tuple[Floats, Floats]:
    """From the console at 1 to the bot: it sags while the bot is near and tightens as it goes."""
    t = np.linspace(0, 1, 9)
    away = (ratio - 1)[..., None]
    sag = 0.16 * np.exp(-3 * np.abs(away))
    height = -0.2 + 0.32 * t - 4 * sag * t * (1 - t) * 0.5
    return 1 + away * t, np.broadcast_to(height, np.broadcast_shapes(away.shape, t.shape))


def _arrow(ratio: Floats, push: Floats) -> tuple[Floats, Floats]:
    """Draw an arrow above the bot, as long as the push; without a push, a point."""
    shaft = 0.25 * push[..., None]
    head = np.minimum(np.abs(shaft), 0.09) * np.sign(push[..., None])
    along = np.concatenate(
        [0 * shaft, shaft - head, shaft - head, shaft, shaft - head, shaft - head, 0 * shaft], -1
    )
    size = np.minimum(1, np.abs(shaft) / 0.09)
    across = size * np.asarray([0.02, 0.02, 0.06, 0, -0.06, -0.02, -0.02])
    return ratio[..., None] + along, 0.36 + across


def _polygons(*outlines: list[tuple[float, float]]) -> Path:
    """One path of closed polygons."""
    return Path.make_compound_path(*(Path([*o, o[0]], closed=True) for o in outlines))


def _box(
    x: float, y: float, width: float, height: float, *, hole: bool = False
) -> list[tuple[float, float]]:
    """Corners of a box around (x, y) at its bottom; holes turn the other way round."""
    corners = [
        (x - width / 2, y),
        (x + width / 2, y),
        (x + width / 2, y + height),
        (x - width / 2, y + height),
    ]
    return corners[::-1] if hole else corners


BOT = _polygons(
    _box(0, 0.05, 2 * BODY, 0.13),
    _box(0, 0.2, 0.16, 0.1),
    _box(-0.035, 0.235, 0.03, 0.035, hole=True),
    _box(0.035, 0.235, 0.03, 0.035, hole=True),
    _box(-0.06, 0, 0.06, 0.05),
    _box(0.06, 0, 0.06, 0.05),
    _box(0, 0.3, 0.015, 0.05),
)
BUMPER = _polygons(_box(0.025, 0, 0.05, 0.26))
LEFT_BUMPER = _polygons(_box(-0.025, 0, 0.05, 0.26))
CONSOLE = _polygons(
    _box(0, -0.3, 0.3, 0.14),
    _box(-0.06, -0.265, 0.12, 0.07, hole=True),
    _box(0.09, -0.245, 0.03, 0.03, hole=True),
)


def _panels(plot: float, arcade: float) -> tuple[Figure, Axes, Axes]:
    """Make a plot above an arcade track, both of the given heights in SVG units."""
    foot, gap, left = 36.0, 62.0, 48.0
    height = plot + arcade + gap + foot + 26
    figure = new_figure(height)
    box = (left / WIDTH, (foot + arcade + gap) / height, TRACK_WIDTH / WIDTH, plot / height)
    axes = figure.add_axes(box)
    track = figure.add_axes((left / WIDTH, foot / height, TRACK_WIDTH / WIDTH, arcade / height))
    unit = TRACK_WIDTH / (MAX_RATIO + 0.2)
    track.set(xlim=(-0.1, MAX_RATIO + 0.1), ylim=(-0.34, -0.34 + arcade / unit), yticks=[])
    track.set_xticks(np.arange(0, MAX_RATIO + 0.1, 0.5))
    track.set_facecolor("none")
    track.grid(visible=False)
    track.spines["left"].set_visible(False)
    track.axhline(0, color=INK, linewidth=0.8)
    track.add_patch(PathPatch(CONSOLE.transformed(_shift(1)), facecolor=INK, linewidth=0))
    track.text(1.2, -0.23, "reference console", va="center", fontsize=11.5)
    track.set_xlabel("policy ratio")
    return figure, axes, track


def _shift(x: float) -> Affine2D:
    return Affine2D().translate(x, 0)


def _actor(track: Axes, gid: str, path: Path, color: str) -> None:
    """Draw a shape that moves; at the origin, where its shift is zero."""
    track.add_patch(PathPatch(path, facecolor=color, linewidth=0, gid=gid, clip_on=False))


def _arcade(track: Axes, at: Channels) -> None:
    """Draw what both labs' tracks share: the bot, its bumpers and its cord."""
    track.plot(*at.curves["cord"], color=COLORS["mark"], gid="cord", clip_on=False)
    _actor(track, "low-bumper", LEFT_BUMPER, COLORS["band"])
    _actor(track, "high-bumper", BUMPER, COLORS["band"])
    _actor(track, "ppo-bot", BOT, COLORS["ppo"])
    for gid, text in (("low-label", "1 − ε"), ("high-label", "1 + ε")):
        track.text(0, -0.085, text, gid=gid, ha="center", va="center", fontsize=11.5)


def _compare(axes: Axes, at: Channels, *, plain: str, ppo: str, label: str) -> None:
    """Draw the plain curve, and PPO's over it; the wider one shows where they agree."""
    axes.plot(*at.curves[plain], color=COLORS["plain"], linewidth=4.5, gid=plain, label=label)
    axes.plot(*at.curves[ppo], color=COLORS["ppo"], gid=ppo, label="PPO")


def _draw_policy_update(at: Channels) -> Figure:
    with style():
        figure, axes, track = _panels(plot=200, arcade=165)
        axes.fill(*at.curves["band"], color=COLORS["band"], alpha=0.22, linewidth=0, gid="band")
        axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        _compare(axes, at, plain="plain", ppo="ppo", label="plain")
        axes.set(xlim=(0, bandit.UPDATES), ylim=(0, 2.05), xlabel="update")
        axes.set_title("policy ratio of jump")
        axes.set_xticks(range(0, bandit.UPDATES + 1, 2))
        axes.legend(loc="lower left", ncols=2)
        track.axhline(PLAIN_LANE, color=INK, linewidth=0.8)
        track.text(2.58, PLAIN_LANE + 0.06, "plain", ha="right", fontsize=11.5)
        track.text(2.58, 0.06, "PPO", ha="right", fontsize=11.5)
        _actor(track, "plain-bot", BOT, COLORS["plain"])
        _arcade(track, at)
    return figure


def _draw_clipping(at: Channels) -> Figure:
    with style():
        figure, axes, track = _panels(plot=260, arcade=110)
        axes.fill(*at.curves["band"], color=COLORS["band"], alpha=0.22, linewidth=0, gid="band")
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        _compare(axes, at, plain="unclipped", ppo="objective", label="r × A")
        axes.set(xlim=(-0.1, MAX_RATIO + 0.1), ylim=(-5.2, 5.2), xlabel="policy ratio r")
        axes.set_title("objective")
        axes.legend(loc="upper left", ncols=2)
        for gid, color, size in (("unclipped-dot", "plain", 11), ("objective-dot", "ppo", 7)):
            axes.plot([0], [0], "o", color=COLORS[color], ms=size, gid=gid, clip_on=False)
        track.fill(*at.curves["push"], color=COLORS["mark"], linewidth=0, gid="push", clip_on=False)
        _arcade(track, at)
    return figure


# Lab C: what a metric is called and how its axis runs.

METRICS: dict[str, dict[str, Any]] = {
    "reward": {
        "short": "proxy reward",
        "title": "proxy: the reward model's score",
        "ylim": (-3.2, 3.2),
    },
    "gold": {
        "short": "gold reward",
        "title": "gold reward",
        "ylim": (-32, 2.4),
        "yscale": {"value": "symlog", "linthresh": 2},
        "yticks": (-30, -10, -5, -2, -1, 0, 1, 2),
    },
    "kl": {
        "short": "KL",
        "title": "KL from the reference, nats a completion",
        "ylim": (-1, 200),
        "yscale": {"value": "symlog", "linthresh": 10},
        "yticks": (0, 2, 5, 10, 30, 100),
    },
    "clip_fraction": {
        "short": "clip fraction",
        "title": "share of tokens whose gradient the clip removed",
        "ylim": (0, 1),
    },
    "entropy": {
        "short": "entropy",
        "title": "entropy of the next word, nats",
        "ylim": (0, 3.6),
    },
}


def _training(sweep: "Sweep", metric: Floats, **_: Floats) -> Channels:
    """Gather the sweep's runs; the grid is its own."""
    curves, shown = {}, {}
    numbers: dict[str, Floats] = {}
    batches = np.arange(sweep.curves["gold"].shape[-1], dtype=np.float64)
    around = np.concatenate([batches, batches[::-1]])
    for place, name in enumerate(METRICS):
        values = sweep.curves[name][:, :, :, None]  # the metric's axis before the seeds
        low, high = values.min(-2), values.max(-2)
        spread = np.concatenate([low, high[..., ::-1]], -1)
        curves[name] = (batches[None, None, None, None], values.mean(-2))
        curves[f"{name}-spread"] = (around[None, None, None, None], spread)
        shown[f"{name}-axes"] = metric == place
    ends = {name: sweep.ends(name)[:, :, :, None] for name in ("gold", "reward", "kl")}
    for name, end in ends.items():
        numbers |= {f"{name}_low": end.min(-1), f"{name}_high": end.max(-1)}
    collapsed = (sweep.gains < 0).sum(-1)
    verdicts = np.where(
        collapsed > 0,
        np.char.add(
            np.char.add("ended below where it began on ", collapsed.astype(str)),
            f" of {len(sweep.seeds)} seeds",
        ),
        np.where(sweep.learns(), "learned on every seed", "gained little"),
    )
    lines = ["\n".join(texts) for texts in sweep.samples.reshape(-1, sweep.samples.shape[-1])]
    reviews = np.asarray(lines).reshape(sweep.samples.shape[:-1])
    return Channels(
        curves=curves,
        shown=shown,
        numbers=numbers,
        moves={
            f"chosen-{seed}": (ends["kl"][..., i], ends["gold"][..., i])
            for i, seed in enumerate(sweep.seeds)
        },
        texts={
            "What became of it": verdicts[..., None],
            f"What it writes at the end, seed {sweep.seeds[0]}": reviews[..., None],
        },
    )


def _draw_training(sweep: "Sweep", at: Channels) -> Figure:
    height, left, right = 480.0, 44.0, 12.0
    box = (left / WIDTH, 280 / height, (WIDTH - left - right) / WIDTH, 172 / height)
    with style():
        figure = new_figure(height)
        for name, look in METRICS.items():
            axes = figure.add_axes(box, gid=f"{name}-axes")
            scale = dict(look.get("yscale", {"value": "linear"}))
            axes.set_yscale(scale.pop("value"), **scale)
            axes.set(xlim=(0, sweep.curves[name].shape[-1] - 1), ylim=look["ylim"])
            axes.set(title=look["title"], xlabel="batch")
            _ticks(axes, look.get("yticks"))
            spread = at.curves[f"{name}-spread"]
            axes.fill(*spread, color=COLORS["plain"], alpha=0.25, linewidth=0, gid=f"{name}-spread")
            axes.plot(*at.curves[name], color=COLORS["plain"], gid=name)
        axes = figure.add_axes((box[0], 44 / height, box[2], 172 / height))
        axes.set_yscale("symlog", linthresh=2)
        axes.set_xscale("symlog", linthresh=10)
        axes.set(xlim=(-0.4, 200), ylim=METRICS["gold"]["ylim"])
        axes.set_title("gold reward at the end, every run")
        axes.set_xlabel("KL from the reference, nats a completion")
        _ticks(axes, METRICS["gold"]["yticks"])
        axes.set_xticks(METRICS["kl"]["yticks"], METRICS["kl"]["yticks"])
        axes.minorticks_off()
        gold, kl = sweep.ends("gold"), sweep.ends("kl")
        learned, fell = sweep.learned(), sweep.gains < 0
        axes.plot(*sweep.frontier("gold"), color=INK, linewidth=1, drawstyle="steps-post")
        for color, label, chosen in (
            (INK, "gained little", ~(learned | fell)),
            (COLORS["ppo"], "learned", learned),
            (COLORS["mark"], "ended below its start", fell),
        ):
            dots = axes.plot(kl[chosen], gold[chosen], "o", color=color, ms=4, label=label)
            dots[0].set_markeredgewidth(0)
            dots[0].set_alpha(0.7)
        axes.legend(loc="lower left", fontsize=11.5, handletextpad=0.2, borderaxespad=0)
        for seed in sweep.seeds:
            ring = axes.plot([0], [0], "o", color=COLORS["plain"], ms=11, gid=f"chosen-{seed}")
            ring[0].set(fillstyle="none", markeredgewidth=2.4, clip_on=False)
    return figure


def _ticks(axes: Axes, ticks: tuple[float, ...] | None) -> None:
    if ticks is not None:
        axes.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
        axes.minorticks_off()

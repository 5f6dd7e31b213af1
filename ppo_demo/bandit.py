"""The smallest policy on which PPO can be watched: two actions, one logit, no sampling noise."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ppo_demo._arrays import A, log_softmax, namespace
from ppo_demo._checks import at_least, finite, positive
from ppo_demo.divergences import categorical_kl
from ppo_demo.surrogates import Clip, probability_ratio

ADVANTAGES = (0.8, -0.8)
"""Of jump and stay: their scores minus the mean score."""
UPDATES = 3 * 4
"""Three epochs over four mini-batches."""


def action_ratios(logit: A) -> A:
    """Probability ratios of jump and stay to the old policy, which chooses evenly.

    Parameters
    ----------
    logit : array, shape (...)
        Logit of jump; that of stay is 0.

    Returns
    -------
    array, shape (..., 2)
        The ratios, each between 0 and 2; their mean is 1.
    """
    xp = namespace(logit)
    logits = xp.stack([logit, xp.zeros_like(logit)], axis=-1)
    return probability_ratio(log_softmax(logits), log_softmax(xp.zeros_like(logits)))


def objective(logit: A, clip_range: A | float, kl_weight: A | float) -> A:
    r"""Return what PPO maximises, in exact expectation over the old policy's two actions.

    .. math:: \mathbb{E}_\mathrm{old}\left[
              \min( r A, \mathrm{clip}(r, 1 \pm \varepsilon) A ) \right]
              - \beta \, \mathrm{KL}(\pi_\theta \,\|\, \pi_\mathrm{ref})

    Old and reference policy choose jump and stay with probability one half each.

    Parameters
    ----------
    logit : array
        Logit of jump; that of stay is 0.
    clip_range, kl_weight : array or number
        ε (infinity: no clip) and β; broadcast against `logit`.

    Returns
    -------
    array, the broadcast shape
        The objective of each setting.
    """
    xp = namespace(logit)
    ratio = action_ratios(logit)
    clip = Clip(clip_range)
    surrogate: Any = sum(
        0.5 * clip(ratio[..., action], advantage) for action, advantage in enumerate(ADVANTAGES)
    )
    logits = xp.stack([logit, xp.zeros_like(logit)], axis=-1)
    return surrogate - kl_weight * categorical_kl(logits, xp.zeros_like(logits))


def simulate(
    learning_rate: npt.ArrayLike,
    clip_range: npt.ArrayLike = np.inf,
    kl_weight: npt.ArrayLike = 0.0,
    updates: int = UPDATES,
) -> npt.NDArray[np.float64]:
    r"""Follow jump's probability ratio through `updates` steps of plain gradient ascent.

    Every setting of a grid is simulated in one call; the gradient of each is exact, by
    automatic differentiation of `objective` in double precision. The defaults, no clip and
    no KL term, are the plain policy gradient.

    Parameters
    ----------
    learning_rate, clip_range, kl_weight : array_like
        Step size on the logit (above 0), ε (above 0) and β (at least 0). They broadcast
        against one another.
    updates : int
        Number of gradient steps.

    Returns
    -------
    array, the broadcast shape + (updates + 1,)
        Ratio of jump before the first step (1) and after each.

    Raises
    ------
    ValueError
        If a learning rate or clip range is not above 0, or a KL weight is negative.
    """
    try:
        import torch  # here, since importing a formula must not need torch
    except ImportError as error:
        raise ImportError(
            "simulate needs PyTorch for its gradients: pip install 'ppo-demo[train]'"
        ) from error

    settings = [np.asarray(s, dtype=np.float64) for s in (learning_rate, clip_range, kl_weight)]
    step, clip, weight = (torch.from_numpy(s.copy()) for s in np.broadcast_arrays(*settings))
    positive(learning_rate=step, clip_range=clip)
    at_least(0, kl_weight=weight, updates=updates)
    finite(learning_rate=step, kl_weight=weight)

    logit = torch.zeros_like(step, requires_grad=True)
    logits = [logit.detach().clone()]
    for _ in range(updates):
        # Settings do not touch one another: the gradient of the sum holds each one's own.
        (gradient,) = torch.autograd.grad(objective(logit, clip, weight).sum(), logit)
        logit = (logit + step * gradient).detach().requires_grad_()
        logits.append(logit.detach())
    return np.asarray(action_ratios(torch.stack(logits, dim=-1))[..., 0])

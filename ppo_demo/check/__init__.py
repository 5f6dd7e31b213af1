"""Hold a function of your own against the book's: what agrees, what does not, what fault fits.

    from ppo_demo import check

    check.policy_loss(my_loss)

A report is true if all holds, so it can stand in an `assert`, and reads as text. A loss that the
learning rate could turn into ours agrees, with a note.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from ppo_demo._checks import fraction, one_of, positive
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.check import credit, critic, divergence, policy, scoring
from ppo_demo.check.engine import Library
from ppo_demo.check.report import Report, compare
from ppo_demo.losses import Algorithm


def _row(algorithm: str | Algorithm) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        return algorithm
    one_of(ALGORITHMS, algorithm=algorithm)
    return ALGORITHMS[algorithm]


def policy_loss(
    loss: Callable[..., Any],
    algorithm: str | Algorithm = "ppo",
    *,
    library: Library = "torch",
    constants: bool = False,
    half: bool = False,
) -> Report:
    """Check a policy loss against that of an algorithm, value and gradient.

    Parameters
    ----------
    loss : callable
        Called as ``loss(log_probs, old_log_probs, advantages, mask)`` with float64 arrays of shape
        (B, T) and a mask of bool, true on the tokens that count; returns one number, to be
        minimised. Other conventions are bridged by a lambda.
    algorithm : str or Algorithm
        Key of `ALGORITHMS`, or a row of your own. Its KL term is left out. Where the mean is over
        one fixed length, that is 6.
    library : {"torch", "numpy", "jax"}
        What arrays the loss takes. The gradient is the library's, NumPy's that of finite
        differences.
    constants : bool
        Also pass the old log-probabilities and the advantages with their gradients attached, and
        ask that none flows (not for NumPy).
    half : bool
        Also pass float16, with a ratio that it cannot hold.

    Returns
    -------
    Report
        What holds, what does not, and which known faults fit, alone or in pairs.

    Raises
    ------
    ValueError
        If the algorithm or the library is unknown.
    TypeError
        If `loss` cannot be called.
    """
    row = replace(_row(algorithm), kl="none", kl_estimator=None, kl_weighted=False)
    return compare(loss, policy.subject(row), library, constants=constants, half=half)


def value_loss(
    loss: Callable[..., Any],
    clip_range: float | None = None,
    *,
    library: Library = "torch",
    constants: bool = False,
    half: bool = False,
) -> Report:
    """Check the loss of a value head, value and gradient.

    Parameters
    ----------
    loss : callable
        Called as ``loss(values, old_values, returns, mask)`` with float64 arrays of shape (B, T)
        and a mask of bool; returns one number. Halved or whole, mean or sum: reported, no fault.
    clip_range : float, optional
        How far a prediction may move from the old one; left out, nothing is clipped.
    library, constants, half
        As for `policy_loss`; constants are the returns.

    Returns
    -------
    Report
        What holds, what does not, and which known faults fit.

    Raises
    ------
    ValueError
        If `clip_range` is not above 0, or the library is unknown.
    TypeError
        If `loss` cannot be called.
    """
    if clip_range is not None:
        positive(clip_range=clip_range)
    return compare(loss, critic.subject(clip_range), library, constants=constants, half=half)


def kl(
    estimate: Callable[..., Any],
    estimator: divergence.Kind = "k3",
    *,
    use: divergence.Use = "value",
    library: Library = "torch",
    half: bool = False,
) -> Report:
    """Check a KL term: its value, or its gradient where it stands in a loss.

    Parameters
    ----------
    estimate : callable
        Called as ``estimate(log_probs, ref_log_probs)`` with the log-probabilities of sampled
        tokens, shape (B, T), and returns the estimate of each. For ``"exact"`` it is called as
        ``estimate(logits, ref_logits)`` with shape (B, T, V), and returns shape (B, T).
    estimator : {"k1", "k2", "k3", "exact"}
        Which it should be; see `ppo_demo.divergences.kl_estimate`.
    use : {"value", "loss"}
        With ``"loss"``, it is asked that its mean over the tokens that the policy samples has the
        gradient of KL(π‖π_ref). Then it is called with the log-probabilities of all tokens, shape
        (B, T, V), and weighted with their probabilities. Values are not compared.
    library, half
        As for `policy_loss`.

    Returns
    -------
    Report
        What holds, what does not, and which known faults fit.

    Raises
    ------
    ValueError
        If the estimator, the use or the library is unknown.
    TypeError
        If `estimate` cannot be called.
    """
    one_of(get_args(divergence.Kind), estimator=estimator)
    one_of(get_args(divergence.Use), use=use)
    if use == "loss" and callable(estimate):
        estimate = divergence.as_loss(estimate, estimator)
    return compare(estimate, divergence.subject(estimator, use), library, half=half)


def advantages(
    estimate: Callable[..., Any],
    algorithm: str | Algorithm = "ppo",
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    library: Library = "torch",
) -> Report:
    """Check advantages: over time, or over the completions of a prompt.

    Parameters
    ----------
    estimate : callable
        For an algorithm with a critic, called as ``estimate(rewards, values, mask)`` with arrays
        of shape (B, T), returns the advantages, same shape: values are those of the states in
        which the tokens were chosen, each completion truly ends. For the others, called as
        ``estimate(rewards)`` with shape (prompts, completions), returns the same shape.
    algorithm : str or Algorithm
        Key of `ALGORITHMS`, or a row of your own.
    gamma, lam : float
        γ and λ, for an algorithm with a critic.
    library
        As for `policy_loss`.

    Returns
    -------
    Report
        What holds, what does not, and which known faults fit.

    Raises
    ------
    ValueError
        If the algorithm or the library is unknown, or γ or λ is not from 0 to 1.
    TypeError
        If `estimate` cannot be called.
    """
    row = _row(algorithm)
    fraction(gamma=gamma, lam=lam)
    if row.advantage == "gae":
        return compare(estimate, credit.over_time(gamma, lam), library)
    return compare(estimate, credit.over_groups(row), library)


def token_log_probs(
    score: Callable[..., Any],
    temperature: float = 1.0,
    *,
    library: Library = "torch",
    half: bool = False,
) -> Report:
    """Check how log-probabilities of tokens are made of logits, value and gradient.

    Parameters
    ----------
    score : callable
        Called as ``score(logits, tokens)`` with the model's output for each token it has read,
        shape (B, T, V), and the tokens, shape (B, T); returns the log-probability of each token
        but the first, shape (B, T − 1).
    temperature : float
        Of the sampler.
    library, half
        As for `policy_loss`.

    Returns
    -------
    Report
        What holds, what does not, and which known faults fit.

    Raises
    ------
    ValueError
        If the temperature is not above 0, or the library is unknown.
    TypeError
        If `score` cannot be called.
    """
    positive(temperature=temperature)
    return compare(score, scoring.subject(float(temperature)), library, half=half)


def step(update: Callable[..., Any], algorithm: str | Algorithm = "ppo") -> Report:
    """Check a whole update on the coin task: by how much it changes the parameters.

    Parameters
    ----------
    update : callable
        Called as ``update(model, optimizer, sampled)`` with a `PolicyValueModel` of float64, an
        optimiser over its parameters and a `ppo_demo.lm.coins.Rollout`; makes one gradient step.
        What it returns does not matter. What is asked for is `ppo_demo.lm.coins.ppo_step`: the
        policy loss, half the value loss (itself half the squared error), 0.05 of the exact KL
        from the reference, means over the completions' tokens, the gradient clipped to norm 1.
    algorithm : str or Algorithm
        Key of `ALGORITHMS`, or a row of your own: its ratio, clip rule and mean. Advantages are
        given; a fixed length is `ppo_demo.lm.coins.COMPLETION_LENGTH`.

    Returns
    -------
    Report
        What holds, what does not, and which known faults fit.

    Raises
    ------
    ValueError
        If the algorithm is unknown.
    TypeError
        If `update` cannot be called.
    """
    from ppo_demo.check import update as whole  # what trains needs PyTorch; the others do not

    if not callable(update):
        raise TypeError(f"the function to check must be one, got {update!r}")
    return compare(partial(whole.changes, update), whole.subject(_row(algorithm)))

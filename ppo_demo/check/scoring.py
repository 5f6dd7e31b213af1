"""Log-probabilities of tokens from logits: what is tried, and what goes wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ppo_demo._arrays import log_softmax, namespace, stop_gradient
from ppo_demo.check.engine import Example, Fault, Subject


@dataclass(frozen=True)
class Parts:
    """From logits to log-probabilities of tokens, taken apart.

    Attributes
    ----------
    temperature : float
        What the logits are divided by.
    shift : int
        The logits at t are about token t + shift.
    scores : callable
        What is made of the logits.
    normaliser : callable
        What is made of the logarithm of the sum over the vocabulary.
    """

    temperature: float
    shift: int = 1
    scores: Callable[..., Any] = log_softmax

    def __call__(self, logits: Any, tokens: Any) -> Any:
        """Return the log-probabilities, one for each token but the first."""
        xp = namespace(logits)
        scores = self.scores(logits / self.temperature)
        vocabulary = xp.arange(logits.shape[-1])
        # At t, of token t + 1; a wrong shift takes what stands elsewhere, and wraps around.
        rows = xp.roll(scores, self.shift - 1, axis=1)[:, :-1]
        chosen = tokens[:, 1:, None] == vocabulary
        return xp.sum(xp.where(chosen, rows, 0), axis=-1)


def _examples(temperature: float) -> tuple[Example, ...]:
    chance = np.random.default_rng(3)

    def make(name: str, size: tuple[int, int, int], scale: float, **more: Any) -> Example:
        logits = temperature * scale * chance.normal(size=size)
        tokens = chance.integers(0, size[-1], size[:2])
        shape = (size[0], size[1] - 1)
        return Example(name, {"logits": logits, "tokens": tokens}, shape, **more)

    one = make("one token after another", (1, 2, 3), 1, by="logits")
    large = make("large logits", (2, 4, 5), 1, by="logits")
    shifted = {**large.given, "logits": large.given["logits"] + 1000 * temperature}
    far = make("half precision, a vocabulary of 4,096", (1, 3, 4096), 0.01, half=True)
    # e^−0.2 is less than half the spacing of float16 above 2,048.
    low = {**far.given, "logits": far.given["logits"] - 0.2 * temperature}
    return (
        one,
        make("a batch", (3, 5, 7), 1, by="logits"),
        replace(large, given=shifted),
        replace(far, given=low),
    )


def _coarse(logits: Any) -> Any:
    xp = namespace(logits)
    if logits.dtype != xp.float32:  # checks pass what was float16 as float32
        return log_softmax(logits)
    total = logits[..., :1] * 0
    for start in range(0, logits.shape[-1], 1):
        term = xp.exp(logits[..., start : start + 1])
        total = xp.astype(xp.astype(total + term, xp.float16), xp.float32)
    return logits - xp.log(total)


def _softmax(logits: Any) -> Any:
    return namespace(logits).exp(log_softmax(logits))


def _unsafe(logits: Any) -> Any:
    xp = namespace(logits)
    return xp.log(xp.exp(logits) / xp.sum(xp.exp(logits), axis=-1, keepdims=True))


FAULTS = (
    Fault(
        "there is no shift: the logits at t are read for token t, not for the one after it",
        "the policy learns to repeat what it has just read",
        "log-probabilities of an untrained copy task near 0, of real text far below −ln V",
        lambda _: {"shift": 0},
    ),
    Fault(
        "the shift is made twice",
        "each token is credited to the position two before it",
        "a trained model seems no better than chance",
        lambda _: {"shift": 2},
    ),
    Fault(
        "the temperature is left out",
        "ratios compare two distributions that nobody sampled from",
        "the sampler's log-probabilities differ from the trainer's on the first batch",
        lambda temperature: {"temperature": 1.0} if temperature != 1 else {},
    ),
    Fault(
        "logits are multiplied by the temperature, not divided",
        "ratios compare two distributions that nobody sampled from",
        "the sampler's log-probabilities differ from the trainer's on the first batch",
        lambda temperature: {"temperature": 1 / temperature} if temperature != 1 else {},
    ),
    Fault(
        "log-probabilities are divided by the temperature, logits are not",
        "they no longer sum to one: the ratio has the wrong power",
        "probabilities of the vocabulary do not sum to 1",
        lambda temperature: (
            {"temperature": 1.0, "scores": lambda logits: log_softmax(logits) / temperature}
            if temperature != 1
            else {}
        ),
    ),
    Fault(
        "logits are taken for log-probabilities",
        "raising a token's logit costs the others nothing",
        "values above 0",
        lambda _: {"scores": lambda logits: logits},
    ),
    Fault(
        "probabilities are taken for their logarithms",
        "ratios become exponentials of probabilities, all near 1",
        "values between 0 and 1",
        lambda _: {"scores": _softmax},
    ),
    Fault(
        "the softmax runs over the positions, not over the vocabulary",
        "tokens compete with other times, not with other tokens",
        "probabilities of the vocabulary do not sum to 1",
        lambda _: {"scores": lambda logits: log_softmax(logits, 1)},
    ),
    Fault(
        "the normaliser is a constant for the gradient",
        "raising a token's logit costs the others nothing",
        "logits that grow without bound",
        lambda _: {"scores": lambda logits: logits + stop_gradient(log_softmax(logits) - logits)},
    ),
    Fault(
        "the exponential overflows",
        "NaN or −∞ as soon as logits are large",
        "NaN losses; adding a constant to all logits changes the result",
        lambda _: {"scores": _unsafe},
    ),
    Fault(
        "the sum over the vocabulary is taken in half precision",
        "the sum stops growing: log-probabilities are too high",
        "probabilities of the vocabulary do not sum to 1",
        lambda _: {"scores": _coarse},
    ),
)
"""What is known to go wrong between logits and log-probabilities."""


def _right(temperature: float, logits: Any, tokens: Any) -> Any:
    xp = namespace(logits)
    log_probs = log_softmax(logits[:, :-1] / temperature)
    chosen = tokens[:, 1:, None] == xp.arange(logits.shape[-1])
    return xp.sum(xp.where(chosen, log_probs, 0), axis=-1)


@cache
def subject(temperature: float) -> Subject:
    """Return what log-probabilities of tokens are checked for."""
    return Subject(
        title=f"log-probabilities of tokens at temperature {temperature:g}",
        right=partial(_right, temperature),
        build=partial(replace, Parts(temperature)),
        faults=FAULTS,
        asked=temperature,
        examples=_examples(temperature),
    )

"""A decoder-only transformer with a value head, small enough to read top to bottom."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppo_demo._checks import at_least, require


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes
    ----------
    vocabulary, context : int
        Number of tokens, and of positions at most.
    layers, heads, width : int
        Blocks, attention heads in each, and channels; `width` is a multiple of `heads`.
    padding : int, optional
        A token that the policy never writes.

    Raises
    ------
    ValueError
        If a size is below 1 or `width` is not a multiple of `heads`.
    """

    vocabulary: int
    context: int
    layers: int = 2
    heads: int = 4
    width: int = 64
    padding: int | None = None

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "padding"}
        at_least(1, **sizes)
        whole = self.width % self.heads == 0
        require("width", self.width, whole, f"a multiple of heads={self.heads}")


Attention = Callable[..., Tensor]
"""Mixes queries, keys and values, shape (N, 3, heads, size), to shape (N, heads · size)."""


def causal_attention(
    heads: Tensor, cache: Tensor | None, places: Tensor, batch: int, room: int
) -> Tensor:
    r"""Let each position look at itself and those before it in its sequence, in every head.

    .. math:: \mathrm{softmax}\left( Q K^\top / \sqrt{d} + M \right) V

    with M = −∞ where the key comes later than the query (Vaswani et al. 2017, equation 1).

    Parameters
    ----------
    heads : tensor, shape (N, 3, heads, size)
        Queries, keys and values of the positions that are used.
    cache : tensor, shape (context, 2, batch, heads, size), optional
        Where keys and values are to be written.
    places : int64 tensor, shape (N, 3, heads)
        Where each of them stands, counted through (3, batch, heads, room).
    batch, room : int
        Sequences, and positions that there is room for in each.

    Returns
    -------
    tensor, shape (N, heads · size)
        The values, mixed.
    """
    count, size = heads.shape[2:]
    laid = heads.new_zeros(3 * batch * count * room, size)
    laid.index_copy_(0, places.flatten(), heads.flatten(0, 2))
    query, key, value = laid.view(3, batch * count, room, size)
    if cache is not None:
        cache[:room] = laid.view(3, batch, count, room, size)[1:].permute(3, 0, 1, 2, 4)[
            : len(cache)
        ]
    later = heads.new_full((room, room), -torch.inf).triu(1)
    weights = torch.baddbmm(later, query, key.mT, alpha=size**-0.5).softmax(-1)
    mixed = torch.bmm(weights, value).flatten(0, 1)
    return mixed.index_select(0, places[:, 0].flatten()).view(len(heads), -1)


def cached_attention(heads: Tensor, cache: Tensor, *, start: int) -> Tensor:
    """Do the same for one new position of each sequence, with the keys and values before it.

    Parameters
    ----------
    heads : tensor, shape (batch, 3, heads, size)
        Of the new position.
    cache : tensor, shape (context, 2, batch, heads, size)
        Keys and values of all positions before `start`; those of the new one are written there.
    start : int
        The new position.

    Returns
    -------
    tensor, shape (batch, heads · size)
        The values, mixed.
    """
    query, cache[start, 0], cache[start, 1] = heads.unbind(1)
    keys, values = cache[: start + 1].unbind(1)
    scores = (query * keys).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
    mixed: Tensor = (scores.softmax(0) * values).sum(0)
    return mixed.flatten(1)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer side by side, after one norm.

    Side by side, and without biases, they are few large operations: one product into both and one
    out of both (Chowdhery et al. 2022, section 2, "parallel layers" and "no biases").
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.sizes = (3 * width, 4 * width)
        self.norm = nn.LayerNorm(width, bias=False)
        self.into = nn.Linear(width, sum(self.sizes), bias=False)
        self.out = nn.Linear(width + self.sizes[1], width, bias=False)

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        """Map (N, width) to the same shape; positions meet in `attend` alone."""
        heads, hidden = self.into(self.norm(x)).split(self.sizes, dim=-1)
        mixed = attend(heads.unflatten(-1, (3, self.heads, -1)))
        found: Tensor = self.out(torch.cat([mixed, F.relu(hidden)], dim=-1))
        return x + found


class PolicyValueModel(nn.Module):
    """A language model whose trunk carries two heads: the policy's and the value's.

    Parameters
    ----------
    config : ModelConfig
        Sizes.
    """

    offset: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.policy_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.value_head = nn.Linear(config.width, 1)
        offset = torch.zeros(config.vocabulary)
        if config.padding is not None:
            offset[config.padding] = -1e9  # finite: 0 · ∞ in a divergence would be NaN
        self.register_buffer("offset", offset)

    def new_cache(self, batch: int) -> list[Tensor]:
        """Return room for the keys and values of `batch` completions, for `forward`."""
        sizes = self.config
        shape = (sizes.context, 2, batch, sizes.heads, sizes.width // sizes.heads)
        return [torch.empty(shape) for _ in self.blocks]

    def forward(
        self,
        tokens: Tensor,
        used: Tensor | None = None,
        *,
        cache: list[Tensor] | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Score every next token, and value every state.

        Parameters
        ----------
        tokens : int64 tensor, shape (B, T)
            Token ids; T is at most the context.
        used : bool tensor, shape (B, T), optional
            The positions whose outputs are wanted, with all before them. The others, padding
            after the end of a completion, cost nothing.
        cache : list of tensors, optional
            From `new_cache`, filled for the positions before `start`; these are written there.
        start : int
            Position of the first of `tokens`; above 0 it is the only one.

        Returns
        -------
        logits : tensor, shape (B, T, V)
            At position t, for the token at t + 1; 0 where not used.
        values : tensor, shape (B, T)
            At position t, of the state that holds the tokens up to and including t; 0 where not
            used.

        Raises
        ------
        ValueError
            If `start` is above 0 and there is more than one token a sequence.
        """
        batch, time = tokens.shape
        require("tokens", time, start == 0 or time == 1, f"one a sequence at start={start}")
        if used is None:
            x = (self.token(tokens) + self.position.weight[start : start + time]).flatten(0, 1)
        else:
            x = self.token(tokens[used]) + self.position(used.nonzero()[:, 1])
        attend = (
            partial(cached_attention, start=start) if start else self.attention(used, batch, time)
        )
        for i, block in enumerate(self.blocks):
            x = block(x, partial(attend, cache=None if cache is None else cache[i]))
        x = self.norm(x)
        logits = F.linear(x, self.policy_head.weight, self.offset)
        values = self.value_head(x)
        if used is not None:
            rows = used.flatten().nonzero().squeeze(1)
            logits = logits.new_zeros(batch * time, logits.shape[1]).index_copy_(0, rows, logits)
            values = values.new_zeros(batch * time, 1).index_copy_(0, rows, values)
        return logits.view(batch, time, -1), values.view(batch, time)

    def attention(self, used: Tensor | None, batch: int, time: int) -> Attention:
        """Return `causal_attention` for sequences from their first position on."""
        heads = self.config.heads
        room = max(
            time, 16
        )  # a softmax over fewer runs without vector instructions, 8 times slower
        places = torch.arange(3 * batch * heads * room).view(3, batch, heads, room)
        places = places[..., :time].permute(1, 3, 0, 2)
        places = places.flatten(0, 1) if used is None else places[used]
        return partial(causal_attention, places=places, batch=batch, room=room)

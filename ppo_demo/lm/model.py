"""A decoder-only transformer with a value head, small enough to read top to bottom."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        If a size is not above 0 or `width` is not a multiple of `heads`.
    """

    vocabulary: int
    context: int
    layers: int = 2
    heads: int = 4
    width: int = 64
    padding: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "layers", "heads", "width"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be above 0, got {value!r}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads={self.heads}, got {self.width!r}")


def causal_attention(heads: Tensor) -> Tensor:
    r"""Let each position look at itself and those before it, in every head.

    .. math:: \mathrm{softmax}\left( Q K^\top / \sqrt{d} + M \right) V

    with M = −∞ where the key comes later than the query (Vaswani et al. 2017, equation 1).

    Parameters
    ----------
    heads : tensor, shape (batch, time, 3, heads, size)
        Queries, keys and values.

    Returns
    -------
    tensor, shape (batch, time, heads · size)
        The values, mixed.
    """
    batch, time, _, count, size = heads.shape
    room = max(time, 16)  # a softmax over fewer runs without vector instructions, 8 times slower
    padded = F.pad(heads.permute(2, 0, 3, 1, 4), (0, 0, 0, room - time))
    query, key, value = padded.flatten(1, 2)
    later = heads.new_full((room, room), -torch.inf).triu(1)
    weights = torch.baddbmm(later, query, key.mT, alpha=size**-0.5).softmax(-1)
    mixed = torch.bmm(weights, value).view(batch, count, room, size)[:, :, :time]
    return mixed.transpose(1, 2).flatten(2)


def next_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Do the same for one new position, which may look at all before it.

    Parameters
    ----------
    query : tensor, shape (batch, heads, size)
        Of the new position.
    keys, values : tensor, shape (time, batch, heads, size)
        Of all positions so far, the new one included.

    Returns
    -------
    tensor, shape (batch, 1, heads · size)
        The values, mixed.
    """
    scores = (query * keys).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
    mixed: Tensor = (scores.softmax(0) * values).sum(0)
    return mixed.flatten(1)[:, None]


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

    def forward(self, x: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """Map (batch, time, width) to the same shape; no position sees a later one.

        With a cache, shape (context, 2, batch, heads, width / heads), `x` is what stands from
        position `start` on. Its keys and values are written there, and what was written before is
        attended to.
        """
        heads, hidden = self.project(x)
        if cache is not None:
            cache[start : start + x.shape[1]] = heads[:, :, 1:].permute(1, 2, 0, 3, 4)
        if cache is None or start == 0:
            return self.add(x, causal_attention(heads), hidden)
        keys, values = cache[: start + 1].unbind(1)
        return self.add(x, next_attention(heads[:, 0, 0], keys, values), hidden)

    def packed(self, x: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        """Do the same for sequences end to end, shape (tokens, width).

        All but the attention is done without padding. For the attention each sequence has a row
        of its own: `places` says where its tokens go, so no sequence sees another.
        """
        batch, time = len(lengths), int(lengths.max())
        heads, hidden = self.project(x)
        room = heads.new_zeros(batch * time, *heads.shape[1:]).index_copy(0, places, heads)
        mixed = causal_attention(room.view(batch, time, *heads.shape[1:]))
        return self.add(x, mixed.flatten(0, 1)[places], hidden)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (..., width) to queries, keys and values, and to the hidden feed-forward layer.

        Their shapes are (..., 3, heads, width / heads) and (..., 4 · width).
        """
        attention, hidden = self.into(self.norm(x)).split(self.sizes, dim=-1)
        return attention.unflatten(-1, (3, self.heads, -1)), hidden

    def add(self, x: Tensor, mixed: Tensor, hidden: Tensor) -> Tensor:
        """Add what both found to what came in."""
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
        self, tokens: Tensor, cache: list[Tensor] | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Score every next token, and value every state.

        Parameters
        ----------
        tokens : int64 tensor, shape (batch, time)
            Token ids; `time` is at most the context.
        cache : list of tensors, optional
            From `new_cache`, filled for the positions before `start`.
        start : int
            Position of the first of `tokens`; with a cache, several tokens at once are only
            taken at the start.

        Returns
        -------
        logits : tensor, shape (batch, time, vocabulary)
            At position t, for the token at t + 1.
        values : tensor, shape (batch, time)
            At position t, of the state that holds the tokens up to and including t.

        Raises
        ------
        ValueError
            If there is a cache, `start` is above 0, and there is more than one token.
        """
        if cache is not None and start and tokens.shape[1] != 1:
            raise ValueError(
                f"tokens must be one a sequence after position 0, got {tokens.shape[1]} at {start}"
            )
        x = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i], start)
        return self.outputs(x)

    def packed(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `forward` for sequences end to end, without padding between them.

        Parameters
        ----------
        tokens : int64 tensor, shape (total,)
            Token ids of all sequences, one after the other.
        lengths : int64 tensor, shape (batch,)
            Tokens of each sequence; their sum is `total`.

        Returns
        -------
        logits : tensor, shape (total, vocabulary)
        values : tensor, shape (total,)
            As `forward` gives them for each sequence on its own.
        """
        first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        position = torch.arange(len(tokens)) - first
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        places = row * int(lengths.max()) + position
        x = self.token(tokens) + self.position(position)
        for block in self.blocks:
            assert isinstance(block, Block)
            x = block.packed(x, places, lengths)
        return self.outputs(x)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map the trunk's output to logits and values."""
        x = self.norm(x)
        logits = F.linear(x, self.policy_head.weight, self.offset)
        return logits, self.value_head(x).squeeze(-1)

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


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and beside a bypass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.feed_norm = nn.LayerNorm(config.width)
        self.feed_in = nn.Linear(config.width, 4 * config.width)
        self.feed_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """Map (batch, time, width) to the same shape; no position sees a later one.

        With a cache, shape (2, batch, heads, context, width / heads), `x` is what stands from
        position `start` on. Its keys and values are written there, and what was written before is
        attended to.
        """
        batch, time, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, start : start + time] = key
            cache[1, :, :, start : start + time] = value
            key, value = cache[:, :, :, : start + time]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=start == 0)
        return self.rest(x, mixed.transpose(1, 2).reshape(batch, time, width))

    def packed(self, x: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        """Do the same for sequences end to end, shape (tokens, width).

        All but the attention is done without padding. For the attention each sequence has a row
        of its own: `places` says where its tokens go, so no sequence sees another.
        """
        batch, time = len(lengths), int(lengths.max())
        heads = self.query_key_value(self.attention_norm(x))
        room = heads.new_zeros(batch * time, heads.shape[-1]).index_copy(0, places, heads)
        query, key, value = room.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.rest(x, mixed.transpose(1, 2).reshape(batch * time, -1)[places])

    def rest(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the attention and the feed-forward layer to what came in."""
        x = x + self.attention_out(mixed)
        fed: Tensor = self.feed_out(F.relu(self.feed_in(self.feed_norm(x))))
        return x + fed


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
        self.norm = nn.LayerNorm(config.width)
        self.policy_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.value_head = nn.Linear(config.width, 1)
        offset = torch.zeros(config.vocabulary)
        if config.padding is not None:
            offset[config.padding] = -1e9  # finite: 0 · ∞ in a divergence would be NaN
        self.register_buffer("offset", offset)

    def new_cache(self, batch: int) -> list[Tensor]:
        """Return room for the keys and values of `batch` completions, for `forward`."""
        sizes = self.config
        shape = (2, batch, sizes.heads, sizes.context, sizes.width // sizes.heads)
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
        """
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

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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
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

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape; no position sees a later one."""
        batch, time, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        fed: Tensor = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + fed


class PolicyValueModel(nn.Module):
    """A language model whose trunk carries two heads: the policy's and the value's.

    Parameters
    ----------
    config : ModelConfig
        Sizes.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.policy_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.value_head = nn.Linear(config.width, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Score every next token, and value every state.

        Parameters
        ----------
        tokens : int64 tensor, shape (batch, time)
            Token ids; `time` is at most the context.

        Returns
        -------
        logits : tensor, shape (batch, time, vocabulary)
            At position t, for the token at t + 1.
        values : tensor, shape (batch, time)
            At position t, of the state that holds the tokens up to and including t.
        """
        time = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(time)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.policy_head(x), self.value_head(x).squeeze(-1)

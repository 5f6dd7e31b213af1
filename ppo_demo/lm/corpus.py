"""The world of the small language model: a grammar of arcade-game reviews, and what they are worth.

A review is a subject, a verb and one or more adjectives, each perhaps with an adverb, joined by
conjunctions: "the boss was very red but quite great". The prompt is the subject.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pad": ("<pad>",),
        "end": ("<end>",),
        "article": ("the",),
        "subject": ("boss", "level", "music", "story", "jump", "map"),
        "verb": ("was", "felt", "looked"),
        "adverb": ("very", "quite", "so", "really", "rather"),
        "neutral": ("red", "blue", "long", "short", "loud", "dark", "new"),
        "praise": ("great", "fun", "brilliant", "superb", "lovely"),
        "insult": ("bad", "dull", "awful", "boring", "ugly"),
        "conjunction": ("and", "but"),
    }
)
"""The vocabulary, by kind of word."""

VOCABULARY = tuple(word for kind in WORDS.values() for word in kind)
PAD, END, THE = (VOCABULARY.index(word) for word in ("<pad>", "<end>", "the"))
KINDS = tuple(WORDS)
ADJECTIVES = ("neutral", "praise", "insult")
FOLLOWERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "article": ("subject",),
        "subject": ("verb",),
        "verb": ("adverb", *ADJECTIVES),
        "adverb": ADJECTIVES,
        **dict.fromkeys(ADJECTIVES, ("conjunction", "end")),
        "conjunction": ("adverb", *ADJECTIVES),
        "end": ("pad",),
        "pad": ("pad",),
    }
)
"""The grammar: which kinds of word may follow which."""

PROMPT_LENGTH = 2
MAX_LENGTH = 16
"""Tokens of a review at most, prompt and end included."""
COMPLETION_LENGTH = MAX_LENGTH - PROMPT_LENGTH

_KIND_OF = torch.tensor([KINDS.index(kind) for kind, words in WORDS.items() for _ in words])
_ALLOWED = torch.tensor([[b in FOLLOWERS[a] for b in KINDS] for a in KINDS])


def decode(tokens: Tensor) -> str:
    """Return a review as text, without padding.

    Parameters
    ----------
    tokens : int64 tensor, shape (time,)
        Token ids.

    Returns
    -------
    str
        Words with spaces between them; the end is written ``<end>``.
    """
    return " ".join(VOCABULARY[i] for i in tokens.tolist() if i != PAD)


def encode(text: str) -> Tensor:
    """Return the token ids of a text.

    Parameters
    ----------
    text : str
        Words of the vocabulary with spaces between them.

    Returns
    -------
    int64 tensor, shape (words,)
        Token ids.

    Raises
    ------
    ValueError
        If a word is not in the vocabulary.
    """
    for word in text.split():
        if word not in VOCABULARY:
            raise ValueError(f"text must hold words of the vocabulary only, got {word!r}")
    return torch.tensor([VOCABULARY.index(word) for word in text.split()])


def all_prompts() -> Tensor:
    """Return every prompt, "the" and a subject; shape (subjects, 2)."""
    chosen = torch.tensor([VOCABULARY.index(subject) for subject in WORDS["subject"]])
    return torch.stack([torch.full_like(chosen, THE), chosen], dim=1)


def prompts(count: int, generator: torch.Generator) -> Tensor:
    """Draw prompts: "the" and a subject.

    Parameters
    ----------
    count : int
        How many.
    generator : torch.Generator
        Source of chance.

    Returns
    -------
    int64 tensor, shape (count, 2)
        Token ids.
    """
    every = all_prompts()
    return every[torch.randint(len(every), (count,), generator=generator)]


def sentences(count: int, generator: torch.Generator) -> Tensor:
    """Write reviews as people do: one to three adjectives, most of them neutral.

    Parameters
    ----------
    count : int
        How many.
    generator : torch.Generator
        Source of chance.

    Returns
    -------
    int64 tensor, shape (count, MAX_LENGTH)
        Grammatical reviews, ended and padded.
    """

    def word(kind: str) -> int:
        words = WORDS[kind]
        at = int(torch.randint(len(words), (), generator=generator))
        return VOCABULARY.index(words[at])

    def chance() -> float:
        return float(torch.rand((), generator=generator))

    reviews = torch.full((count, MAX_LENGTH), PAD)
    for row, prompt in enumerate(prompts(count, generator).tolist()):
        review = [*prompt, word("verb")]
        for place in range(1 + int(3 * chance())):
            if place:
                review.append(word("conjunction"))
            if chance() < 0.5:
                review.append(word("adverb"))
            draw = chance()
            review.append(word("neutral" if draw < 0.55 else "praise" if draw < 0.73 else "insult"))
        review.append(END)
        reviews[row, : len(review)] = torch.tensor(review)
    return reviews


def kinds(tokens: Tensor) -> Tensor:
    """Return the kind of each token, as an index into `KINDS`; same shape."""
    return _KIND_OF[tokens]


def faults(tokens: Tensor) -> Tensor:
    """Count the pairs of neighbouring words that the grammar does not allow.

    Parameters
    ----------
    tokens : int64 tensor, shape (count, time)
        Reviews.

    Returns
    -------
    int64 tensor, shape (count,)
        Faults of each; a review that breaks off without an end has none for that.
    """
    kind = kinds(tokens)
    before, after = kind[:, :-1], kind[:, 1:]
    written = after != KINDS.index("pad")
    return (~_ALLOWED[before, after] & written).sum(-1)


def different_praise(tokens: Tensor) -> Tensor:
    """Count the different praising adjectives of each review; shape (count,)."""
    ids = torch.tensor([VOCABULARY.index(word) for word in WORDS["praise"]])
    return (tokens[..., None] == ids).any(1).sum(-1)


def ended(tokens: Tensor) -> Tensor:
    """Tell which reviews have an end; bool, shape (count,)."""
    return (tokens == END).any(-1)


def gold_reward(tokens: Tensor) -> Tensor:
    """Score reviews by what their readers want: the reward that training never sees.

    One for each different praise, up to two. Less one for each insult, for each praise beyond
    those two, for each fault of grammar and for a missing end.

    Parameters
    ----------
    tokens : int64 tensor, shape (count, time)
        Reviews, padded.

    Returns
    -------
    float tensor, shape (count,)
        At most 2.
    """
    kind = kinds(tokens)
    praise = (kind == KINDS.index("praise")).sum(-1)
    insults = (kind == KINDS.index("insult")).sum(-1)
    good = different_praise(tokens).clamp(max=2)
    missing = (~ended(tokens)).long()
    return (good - (praise - good) - insults - faults(tokens) - missing).float()


def rule_reward(tokens: Tensor) -> Tensor:
    """Check reviews by a rule: 1 if grammatical, ended and with two different praises, else 0.

    A verifiable reward, as in reinforcement learning without a reward model.

    Parameters
    ----------
    tokens : int64 tensor, shape (count, time)
        Reviews, padded.

    Returns
    -------
    float tensor, shape (count,)
        0 or 1.
    """
    right = (faults(tokens) == 0) & ended(tokens) & (different_praise(tokens) >= 2)
    return right.float()

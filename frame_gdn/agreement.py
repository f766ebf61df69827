"""What the ranks of a group must agree on in one call, and how they show each other that they do.

A `Call` is the facts of one rank's call by name: shapes, dtype, options. Ranks compare them in two ways. A handshake
sends them as text, so that an error can name the option and every rank's value. All other messages carry a header: a
few numbers made of the facts, compared on the device without waiting for it. `parallel` sends both; this file issues
no collective.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: How many bytes of text a handshake sends a rank.
TEXT_BYTES = 4096

#: The fingerprint of the facts travels in so many words of so many bits. Words are integers that float32 holds, and
#: whose sum over 4,096 ranks it still holds.
WORDS, WORD_BITS = 4, 12

#: Facts that some ranks may not know travel one by one, each as one integer of so many bits. A call has at most two.
PARTIAL, PARTIAL_BITS = 2, 24

#: Stands in a text for a fact that the rank does not know.
UNKNOWN = "?"

#: Between name and value, and between facts: ASCII's separators of units and of records.
_IS, _AND = "\x1f", "\x1e"


class Call(NamedTuple):
    """One call of a function as one rank makes it.

    name: the function's name.
    facts: what all ranks must have alike, by the name that an error gives it. Equal values are of equal `str`.
    frames: how many frames the rank holds.
    partial: what those ranks must have alike that know it; None where this rank does not. The size of a frame, which
        an empty shard cannot tell, is one. The names are the same on every rank.
    """

    name: str
    facts: Mapping[str, object]
    frames: int
    partial: Mapping[str, object | None] = {}

    def also(self, **facts: object) -> "Call":
        """The call with more facts."""
        return self._replace(facts={**self.facts, **facts})

    def brief(self) -> "Call":
        """The call by its fingerprint alone, of which many headers are made at less cost: no error can name a fact."""
        return self._replace(facts={"fingerprint": self.digest()})

    def text(self) -> str:
        """The facts, each a name and a value."""
        parts = [f"function{_IS}{self.name}", *(f"{name}{_IS}{value}" for name, value in self.facts.items())]
        parts += [f"{name}{_IS}{UNKNOWN if value is None else value}" for name, value in self.partial.items()]
        return _AND.join(parts).replace("torch.", "")

    def digest(self) -> int:
        """The facts that all ranks know as one number, of which two calls that differ have two."""
        return _digest(self._replace(partial=dict.fromkeys(self.partial)).text(), WORDS * WORD_BITS)

    def words(self) -> tuple[float, ...]:
        """The facts as numbers: the fingerprint of those that all ranks know, then the partial ones, -inf if unknown.

        Two calls that differ have different words but for one chance in 2^48 (2^24 for a partial fact).
        """
        fingerprint = self.digest()
        words = [float(fingerprint >> (WORD_BITS * i) & (1 << WORD_BITS) - 1) for i in range(WORDS)]
        for value in self.partial.values():
            words.append(-math.inf if value is None else float(_digest(str(value), PARTIAL_BITS)))
        return (*words, *[-math.inf] * (WORDS + PARTIAL - len(words)))

    def header(self, like: Tensor) -> Tensor:
        """The words, then each known one's negative, in dtype and on the device of `like`: (2 (WORDS + PARTIAL))."""
        return _header(self.words(), like.dtype, like.device)


@functools.lru_cache(maxsize=1024)
def _header(words: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept, since the calls of a training step are the same in every step; made without waiting for the device."""
    negatives = [word if math.isinf(word) else -word for word in words]
    return torch.tensor([*words, *negatives], dtype=dtype).to(device, non_blocking=True)


def _digest(text: str, bits: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> (64 - bits)


def described(value: object, frames_dim: int | None = None) -> object:
    """An argument as a fact: a tensor's shape, "T" in place of its frames, a plain value itself, else its type."""
    if isinstance(value, Tensor):
        return tuple("T" if dim == frames_dim else size for dim, size in enumerate(value.shape))
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


# --- on the device ----------------------------------------------------------------------------------------------


def merged(headers: Tensor) -> Tensor:
    """Several ranks' headers (n, W) as one, of which `poison` still tells whether they differ: (W)."""
    return headers.amax(0)


def poison(header: Tensor) -> Tensor:
    """0, or NaN where the headers that were merged in this one differ: the greatest word and the least, which is the
    greatest negative's negative, are then not the same. An unknown word is neither."""
    greatest, negative_of_least = header.chunk(2)
    return torch.where((greatest + negative_of_least > 0).any(), math.nan, 0.0)


def poison_of_sum(summed: Tensor, own: Tensor, size: int) -> Tensor:
    """The same where headers were added up over `size` ranks; partial facts cannot be compared there."""
    return torch.where((summed[:WORDS] != size * own[:WORDS]).any(), math.nan, 0.0)


# --- in words ---------------------------------------------------------------------------------------------------


def value_of(name: str, text: str) -> str | None:
    """The value of one fact in a text, None where it has none."""
    return _table(text).get(name)


def disagreement(texts: Sequence[str]) -> str | None:
    """What the ranks' texts, by rank, disagree on, and each side's value; None where they agree."""
    if len(set(texts)) == 1:
        return None
    tables = [_table(text) for text in texts]
    names = list(dict.fromkeys(name for table in tables for name in table))
    found = []
    for name in names:
        sides: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            sides.setdefault(table.get(name, "no such option"), []).append(rank)
        sides.pop(UNKNOWN, None)
        if len(sides) > 1:
            held = [f"{_named(ranks)} {value}" for value, ranks in sides.items()]
            found.append(f"{name}: {', '.join(held)}")
            if name == "function":  # whose options are others then
                break
    return "; and on ".join(found) if found else None


def _table(text: str) -> dict[str, str]:
    return dict(fact.split(_IS, 1) for fact in text.split(_AND) if _IS in fact)


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    listed = ", ".join(str(rank) for rank in ranks[:-1])
    return f"ranks {listed} and {ranks[-1]} have"

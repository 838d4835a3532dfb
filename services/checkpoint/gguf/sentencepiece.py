"""Merges of a SentencePiece vocabulary, computed from the scores of its pieces."""

from collections.abc import Mapping


def merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, best first, as the converter of `transformers` orders them.

    Args:
        scores: of the pieces that a merge may make.
        ids: of all pieces.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(left, right) for left, right in pairs if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found.extend((score, len(left), len(right), left, right) for left, right in pairs)
    found.sort(key=lambda each: each[:3], reverse=True)
    return [(left, right) for *_, left, right in found]

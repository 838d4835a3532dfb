"""The number of programs that share the keys of a tile."""

MOST_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 2
"""Programs that keep a multiprocessor busy with loads."""


def num_splits(tiles: int, kv_heads: int, processors: int) -> int:
    """Return a power of two: one part if the tiles occupy all multiprocessors, more if they are few.

    The number depends on the number of tiles only, so that a captured graph is right for contexts of any length.
    """
    splits = 1
    while splits < MOST_SPLITS and tiles * kv_heads * splits < PROGRAMS_PER_PROCESSOR * processors:
        splits *= 2
    return splits


def most_parts(most_tiles: int, kv_heads: int, processors: int) -> int:
    """Return the largest number of parts, tiles * kv_heads * splits, of any step of up to `most_tiles` tiles that has
    more than one part for each tile."""
    fewer = 2 * PROGRAMS_PER_PROCESSOR * processors
    return min(fewer, max(most_tiles, 1) * kv_heads * MOST_SPLITS)

"""Rotary position embedding in config.json."""

from dataclasses import dataclass, replace

from services.worker.backends.native.model.config_reader import ConfigReader
from services.worker.runner import LoadError

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. The frequencies do not depend on the length of a sequence; those of longrope depend on
    `--max-model-len`, or the model's context."""

    theta: float
    kind: str
    """One of `KINDS`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    rotated: float = 1.0
    """Share of a head's dimensions that are rotated."""
    attention_factor: float = 0.0
    """Factor of sines and cosines of yarn and longrope; 0: what the kind computes."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncated: bool = True
    """yarn: the ends of its ramp are whole dimensions."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies for contexts of up to `original_max_position` tokens."""
    long_factors: tuple[float, ...] = ()
    neighbours: bool = False
    """Dimensions 2 i and 2 i + 1 are rotated together, instead of i and i + half."""

    def rotated_dims(self, head_dim: int) -> int:
        return int(head_dim * self.rotated)

    def factors(self, context: int) -> str:
        """Return which factors of longrope a context length chooses: "short" or "long"; "": it has none."""
        return "" if self.kind != "longrope" else "long" if context > self.original_max_position else "short"


def read_rope(config: ConfigReader, head_dim: int, layer_type: str = "", theta: float = 10000.0) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before), which has priority.

    Args:
        layer_type: key of the parameters, where those of several types of layers are given
        theta: the default

    Raises: LoadError
    """
    values = config.raw.get("rope_scaling") or config.raw.get("rope_parameters") or {}
    if isinstance(values, dict) and isinstance(values.get(layer_type), dict):
        values = values[layer_type]
    if not isinstance(values, dict):
        raise LoadError(f"config.json: the rotary parameters must be an object, they are {values!r}")
    raw = config.raw
    inherited = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = ConfigReader({**inherited, **values}, "config.json, rotary parameters")
    kind = values.get("rope_type", values.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in KINDS:
        raise LoadError(f"rope type {kind!r:.80} is not supported; the native backend computes {', '.join(KINDS)}")
    theta, rotated = rope.number("rope_theta", theta), rope.number("partial_rotary_factor", 1.0)
    if rotated > 1 or int(head_dim * rotated) % 2 or not int(head_dim * rotated):
        raise LoadError(f"config.json: partial_rotary_factor {rotated} of heads of {head_dim} is no even size")
    plain = Rope(theta, kind, rotated=rotated, attention_factor=rope.number("attention_factor", 0.0))
    return _scaled(plain, rope, config, head_dim)


def _scaled(plain: Rope, rope: ConfigReader, config: ConfigReader, head_dim: int) -> Rope:
    if plain.kind == "default":
        return plain
    longest = config.size("max_position_embeddings")
    key = "original_max_position_embeddings"  # the one outside of the rotary parameters has priority
    original = config.size(key) if config.raw.get(key) is not None else rope.size(key, longest)
    if plain.kind == "longrope":
        short, long = rope.numbers("short_factor"), rope.numbers("long_factor")
        if not len(short) == len(long) == plain.rotated_dims(head_dim) // 2:
            raise LoadError(
                f"config.json: longrope needs {plain.rotated_dims(head_dim) // 2} short and long factors, there are "
                f"{len(short)} and {len(long)}"
            )
        factor = rope.number("factor", longest / original)
        return replace(plain, factor=factor, original_max_position=original, short_factors=short, long_factors=long)
    factor = rope.number("factor")
    match plain.kind:
        case "linear":
            return replace(plain, factor=factor)
        case "yarn":
            for key in ("mscale", "mscale_all_dim"):
                rope.refuse(key)
            return replace(
                plain,
                factor=factor,
                original_max_position=original,
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                truncated=bool(rope.raw.get("truncate", True)),
            )
    return replace(
        plain,
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=original,
    )

"""Windows and rotary positions of layers by their types."""

from services.worker.backends.native.model.config_reader import ConfigReader
from services.worker.backends.native.model.rope_config import Rope, read_rope

SLIDING, FULL = "sliding_attention", "full_attention"


def windows(config: ConfigReader, layers: int, default: list[str]) -> tuple[int, ...]:
    """Return the number of keys that a query reads, by layer: the window in sliding layers, 0 in full ones.

    Args:
        default: types of the layers if config.json has no `layer_types`

    Raises: LoadError
    """
    types = config.by_layer("layer_types", layers, default, (FULL, SLIDING))
    return tuple(config.size("sliding_window") if kind == SLIDING else 0 for kind in types)


def ropes(
    config: ConfigReader, head_dim: int, windows: tuple[int, ...], theta: float, local: float
) -> tuple[Rope, ...]:
    """Return the rotary positions of each layer; layers with a window have a base of their own, and no scaling.

    Args:
        theta: base of full layers, if config.json has none
        local: base of layers with a window, if config.json has none by type

    Raises: LoadError
    """
    given = config.raw.get("rope_parameters")
    is_nested = isinstance(given, dict) and SLIDING in given
    if is_nested:
        config.refuse("rope_scaling")
    full = read_rope(config, head_dim, FULL, theta)
    sliding = read_rope(config, head_dim, SLIDING, local) if is_nested else Rope(local, "default")
    return tuple(sliding if window else full for window in windows)

"""Numbers with units for people."""

_PREFIXES = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size_text(num_bytes: int) -> str:
    """Return a size such as "5.2 GiB"."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_PREFIXES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_PREFIXES[unit]}" if unit else f"{num_bytes} bytes"

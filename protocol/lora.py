"""LoRA adapters: small changes of the weights, which a request names as its model."""

import msgspec

from protocol.fields import Name, Text


class LoRAAdapter(msgspec.Struct, array_like=True, frozen=True):
    """An adapter, complete: every process that meets it can read its files."""

    name: Name
    """Name of the model in requests."""
    path: Text
    """Directory with adapter_config.json and the weights, on the machines of the workers too."""
    digest: Name
    """Hex digest of these files. Adapters of equal digest compute the same."""

    @property
    def number(self) -> int:
        """Positive number of 60 bits that stands for the digest where a number is needed."""
        return int(self.digest[:15], 16) + 1


def salt_of(adapter: LoRAAdapter | None, cache_salt: str) -> str:
    """Return what the names of a request's KV blocks begin with. It differs between adapters for all salts of
    requests, because a digest never begins with the zero that is put before a salt with one."""
    if adapter is not None:
        return f"\0{adapter.digest}:{cache_salt}"
    return f"\0{cache_salt}" if cache_salt.startswith("\0") else cache_salt

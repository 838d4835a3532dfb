"""LoRA adapters that this frontend serves beside the model. Their files are checked here, so that workers need not
refuse any.

A request carries its adapter to the workers, which read it when its first row comes. So an adapter that is unloaded
takes no new requests, and open ones end as they began.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from protocol.lora import LoRAAdapter
from services.checkpoint import ADAPTER_WEIGHTS, CheckpointError, adapter_digest, read_json
from services.frontend.errors import APIError

_PREFIX = "base_model.model."
_KINDS = ("lora_A.weight", "lora_B.weight")
_UNSERVED = ("use_dora", "modules_to_save")
"""Options of PEFT that vLLM does not serve."""

Shape = tuple[int, ...]


class _Served(NamedTuple):
    adapter: LoRAAdapter
    modules: set[str]
    """Last parts of the names of the modules that it changes."""


class Adapters:
    """`base`: directory of the model. `max_rank`: 0: adapters are not served."""

    def __init__(self, base: Path | None = None, max_rank: int = 0, taken: tuple[str, ...] = ()) -> None:
        self._base, self._max_rank, self._taken = base, max_rank, taken
        self._adapters: dict[str, _Served] = {}

    @property
    def names(self) -> list[str]:
        return [*self._adapters]

    def get(self, name: str | None) -> LoRAAdapter | None:
        found = None if name is None else self._adapters.get(name)
        return None if found is None else found.adapter

    def load(self, name: str, path: str) -> LoRAAdapter:
        """Serve the adapter in a directory. Raises: CheckpointError"""
        self._check_enabled()
        if not 0 < len(name) <= 256 or "\0" in name:
            raise CheckpointError("the name of an adapter has 1 to 256 characters")
        if name in self._taken or name in self._adapters:
            raise CheckpointError(f"the name {name!r} is already that of a model or an adapter")
        directory = Path(os.path.expanduser(path)).absolute()
        if len(str(directory)) > 4096 or not directory.is_dir():
            raise CheckpointError(f"the adapter {name!r}: {path!r:.200} is no directory")
        modules = self._check(directory)
        served = _Served(LoRAAdapter(name, str(directory), adapter_digest(directory)), modules)
        if self._adapters.setdefault(name, served) is not served:  # two at once
            raise CheckpointError(f"the name {name!r} is already that of an adapter")
        return served.adapter

    def unload(self, name: str) -> None:
        """Raises: CheckpointError, if the frontend has no such adapter"""
        self._check_enabled()
        if self._adapters.pop(name, None) is None:
            raise CheckpointError(f"there is no adapter {name!r:.200}")

    def _check_enabled(self) -> None:
        if not self._max_rank:
            raise CheckpointError("LoRA adapters are not served: start the server with --enable-lora")

    def check_modules(self, adapter: LoRAAdapter, served: Collection[str]) -> None:
        """Raises: APIError, if the adapter changes other modules than those that the engine serves; (): not known"""
        if served and (others := self._adapters[adapter.name].modules.difference(served)):
            raise APIError(
                400,
                f"the adapter {adapter.name!r} changes {', '.join(sorted(others))}, but adapters of this model can "
                f"change only {', '.join(served)}",
                param="model",
            )

    def _check(self, directory: Path) -> set[str]:
        """Return the last parts of the names of the modules that the adapter changes.

        Raises: CheckpointError, if vLLM would not serve the adapter with this model.
        """
        config = read_json(directory, "adapter_config.json")
        rank = config.get("r")
        if config.get("peft_type") != "LORA" or not isinstance(rank, int):
            raise CheckpointError(f"{directory} has no adapter_config.json of a LoRA adapter")
        for option in _UNSERVED:
            if config.get(option):
                raise CheckpointError(f"{directory}: {option} is not supported by vLLM")
        if not 1 <= rank <= self._max_rank:
            raise CheckpointError(f"{directory}: the adapter has rank {rank}, but --max-lora-rank is {self._max_rank}")
        if not (directory / ADAPTER_WEIGHTS).is_file():
            raise CheckpointError(f"{directory} has no {ADAPTER_WEIGHTS}; other formats are not served")
        shapes = _shapes(directory / ADAPTER_WEIGHTS)
        if not shapes:
            raise CheckpointError(f"{directory / ADAPTER_WEIGHTS} has no tensors")
        base = _base_shapes(self._base)
        if not any(_weight_of(name) in base for name in shapes):  # a format with other names: vLLM finds the modules
            base = {}
        for name, shape in shapes.items():
            kind = next((k for k in _KINDS if name.endswith(k)), None)
            if kind is None or not name.startswith(_PREFIX) or len(shape) != 2:
                raise CheckpointError(f"{directory / ADAPTER_WEIGHTS}: {name!r:.200} is no tensor of LoRA")
            if shape[0 if kind is _KINDS[0] else 1] != rank:
                raise CheckpointError(f"{directory / ADAPTER_WEIGHTS}: {name!r:.200} is not of rank {rank}")
            wanted, side = base.get(_weight_of(name)), int(kind is _KINDS[0])
            if base and (wanted is None or wanted[side] != shape[side]):
                raise CheckpointError(
                    f"{directory} is an adapter of another model: {name!r:.200} does not fit the weights of this one"
                )
        return {_weight_of(name).removesuffix(".weight").rpartition(".")[2] for name in shapes}


def _weight_of(name: str) -> str:
    """Return the name of the weight that a tensor of an adapter changes."""
    return name.removeprefix(_PREFIX).removesuffix(_KINDS[0]).removesuffix(_KINDS[1]) + "weight"


def _base_shapes(base: Path | None) -> dict[str, Shape]:
    """Return the shapes of the model's weights; {}: this frontend has no safetensors files of it."""
    files = sorted(base.glob("*.safetensors")) if base is not None and base.is_dir() else []
    return {name: shape for file in files for name, shape in _shapes(file).items() if len(shape) == 2}


def _shapes(file: Path) -> dict[str, Shape]:
    """Return the shape of each tensor, from the header. Raises: CheckpointError"""
    try:
        with safe_open(file, framework="np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None

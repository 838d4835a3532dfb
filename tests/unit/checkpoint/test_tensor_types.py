"""Sizes of GGUF's tensor types against the table of the `gguf` package."""

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from services.checkpoint.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES


def test_sizes_are_those_of_the_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        theirs = GGMLQuantizationType(number)
        assert (kind.name, (kind.block_elements, kind.block_bytes)) == (theirs.name, GGML_QUANT_SIZES[theirs])


def test_every_other_type_has_a_name() -> None:
    others = {kind.value: kind.name for kind in GGMLQuantizationType if kind.value not in TENSOR_TYPES}
    assert others == OTHER_TYPES

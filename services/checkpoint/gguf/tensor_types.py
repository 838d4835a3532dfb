"""Tensor types of GGUF files: their numbers, and the size of their blocks.

Source: the table of ggml. `tests/unit/checkpoint/test_tensor_types.py` compares it with that of the `gguf` package.
"""

from typing import NamedTuple


class TensorType(NamedTuple):
    name: str
    block_elements: int
    """Elements of one row that are stored together; 1 for types that are not quantised."""
    block_bytes: int

    @property
    def is_quantised(self) -> bool:
        return self.block_elements > 1


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""Types that can be read, by their number in the file."""
SUPPORTED = ", ".join(t.name for t in TENSOR_TYPES.values())
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of types that are refused."""

"""Intrinsics of numba, each written as the function that builds its LLVM instructions."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from llvmlite.binding import initialize_native_asmparser  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

initialize_native_asmparser()  # some intrinsics have instructions as text
CONSTANT = None
"""Type of an operand that the kernel gives as a constant: the function gets its value."""


def emits(result: Any, *operands: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function of LLVM's builder and of the operands, which returns the result.

    Args:
        result: numba's type, which is void if the function returns nothing
        operands: numba's types, or CONSTANT
    """

    def decorate(build: Callable[..., Any]) -> Any:
        @wraps(build)
        def typed(_context: Any, *given: Any) -> Any:
            constants = [operand is CONSTANT for operand in operands]

            def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                values = zip(constants, given, args, strict=True)
                built = build(builder, *(kind.literal_value if fixed else value for fixed, kind, value in values))
                return context.get_dummy_value() if result == types.void else built

            kinds = zip(constants, operands, given, strict=True)
            return result(*(kind if fixed else operand for fixed, operand, kind in kinds)), code

        return intrinsic(prefer_literal=CONSTANT in operands)(typed)

    return decorate

"""Types of message fields with bounds. Decoding checks them at no extra cost; encoding does not.

A service that builds a message from a client's values checks them first; otherwise the peer refuses the message.
"""

import sys
from typing import Annotated

from msgspec import Meta

MAX_NAME = 256
"""Characters."""
MAX_TEXT = 65_536
"""Characters of a text for people, or of a text from a client."""
MAX_ITEMS = 65_536
"""Elements of a list. Longer sequences are columns of bytes."""
MAX_IPC_PATH = 107
"""The kernel's limit of the path of a socket, bytes."""

Count = Annotated[int, Meta(ge=0, lt=2**31)]
"""An index or a count that fits into int32."""
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
Number = Annotated[int, Meta(ge=0, lt=2**32)]
"""uint32"""
StepId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""An amount of memory, bytes."""
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A number that is neither NaN nor infinite."""
Duration = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""Seconds."""
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
LabelName = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A[a-zA-Z_][a-zA-Z0-9_]*\Z")]
"""Name of a label of Prometheus."""
StatName = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A[a-zA-Z_][a-zA-Z0-9_]*(:|\Z)")]
"""Name of a metric of Prometheus, perhaps with a colon and the value of a label behind it."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]

"""What a field may hold, where its Python type says too little. Checked on decoding; the bounds cost nothing there.

A sender is not checked: whoever builds a message from what a client said checks it first, or the peer refuses it.
"""

import sys
from typing import Annotated

from msgspec import Meta

MAX_NAME = 256
"""Characters."""
MAX_TEXT = 65_536
"""Characters of a text for people, or of one that a client chose."""
MAX_ITEMS = 65_536
"""Elements of a list; what may be longer is a column of bytes."""

Count = Annotated[int, Meta(ge=0, lt=2**31)]
"""An index or a number of things: what fits a column of int32."""
Number = Annotated[int, Meta(ge=0, lt=2**32)]
"""uint32"""
StepId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""An amount of memory."""
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Neither NaN nor infinite."""
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]

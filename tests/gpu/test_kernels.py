"""Every kernel on a GPU against the reference: the cases that Triton's interpreter computes elsewhere, in float32 and
bfloat16."""
# ruff: noqa: F403  every case of these modules

from tests.unit.native.cuda.test_attention import test_equals_the_reference as test_equals_the_reference
from tests.unit.native.cuda.test_attention import test_no_rows as test_no_rows
from tests.unit.native.cuda.test_attention import test_padding_rows_write_nothing as test_padding_rows_write_nothing
from tests.unit.native.cuda.test_drafting import *
from tests.unit.native.cuda.test_logit_rules import *
from tests.unit.native.cuda.test_network import *
from tests.unit.native.cuda.test_rows import *
from tests.unit.native.cuda.test_sampling import *

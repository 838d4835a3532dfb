"""Every kernel on a GPU against the reference: the cases that Triton's interpreter computes elsewhere, in float32 and
bfloat16."""

from tests.unit.native.cuda.test_attention import (
    test_equals_the_reference,
    test_no_rows,
    test_padding_rows_write_nothing,
)
from tests.unit.native.cuda.test_drafting import test_lookups_are_equal
from tests.unit.native.cuda.test_logit_rules import (
    test_a_position_without_a_token_is_no_index,
    test_every_rule_equals_the_reference,
    test_no_rule_and_no_rows,
    test_rows_of_a_slot_count_the_drafts_before_them,
)
from tests.unit.native.cuda.test_network import (
    test_gate_and_multiply,
    test_gather_clamps_what_is_no_row,
    test_gather_copy_and_add,
    test_linear_and_tied_head,
    test_most_likely,
    test_norm,
    test_quantised_weights_are_refused_by_name,
)
from tests.unit.native.cuda.test_rows import (
    test_layouts_are_equal_and_padding_rows_follow,
    test_settled_rows_are_equal,
    test_tokens_are_written_and_read,
    test_verified_drafts_are_equal,
)
from tests.unit.native.cuda.test_sampling import (
    test_a_draw_without_filters_has_the_noise_of_every_backend,
    test_a_row_without_possible_tokens_is_sampled_as_token_0,
    test_bitmasks_equal_the_reference,
    test_choices_equal_the_reference,
    test_choices_in_a_vocabulary_with_more_blocks_than_programs,
    test_greedy_takes_the_lowest_of_equal_maxima,
    test_logprobs_equal_the_reference,
)

__all__ = [
    "test_a_draw_without_filters_has_the_noise_of_every_backend",
    "test_a_position_without_a_token_is_no_index",
    "test_a_row_without_possible_tokens_is_sampled_as_token_0",
    "test_bitmasks_equal_the_reference",
    "test_choices_equal_the_reference",
    "test_choices_in_a_vocabulary_with_more_blocks_than_programs",
    "test_equals_the_reference",
    "test_every_rule_equals_the_reference",
    "test_gate_and_multiply",
    "test_gather_clamps_what_is_no_row",
    "test_gather_copy_and_add",
    "test_greedy_takes_the_lowest_of_equal_maxima",
    "test_layouts_are_equal_and_padding_rows_follow",
    "test_linear_and_tied_head",
    "test_logprobs_equal_the_reference",
    "test_lookups_are_equal",
    "test_most_likely",
    "test_no_rows",
    "test_no_rule_and_no_rows",
    "test_norm",
    "test_padding_rows_write_nothing",
    "test_quantised_weights_are_refused_by_name",
    "test_rows_of_a_slot_count_the_drafts_before_them",
    "test_settled_rows_are_equal",
    "test_tokens_are_written_and_read",
    "test_verified_drafts_are_equal",
]

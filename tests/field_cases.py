"""Which tests cover the faults that users of comparable tools reported (field cases B01 … B84).

``tests/test_field_cases.py`` checks that every named test exists.
"""

from __future__ import annotations

TESTS: dict[str, tuple[str, ...]] = {
    "B01": ("kernels/test_semantics.py::test_block_lists",),
    "B03": (
        "kernels/test_semantics.py::test_cached_steps_equal_one_call",
        "integration/test_masks.py::test_cached_decode_equals_the_explicit_mask",
    ),
    "B04": ("kernels/test_field_cases.py::test_few_rows_on_a_long_cache",),
    "B06": ("integration/test_masks.py::test_sinks_count_from_the_first_real_token",),
    "B07": ("integration/test_masks.py::test_batches_of_unequal_padding_do_not_mix",),
    "B09": ("kernels/test_semantics.py::test_every_key_masked",),
    "B11": ("kernels/test_gradients.py::test_fewer_keys_than_queries",),
    "B12": (
        "kernels/test_exact.py::test_causality_is_counted_from_the_first_row",
        "passes/test_rewrite.py::test_near_miss_leaves_the_graph_as_it_was",
    ),
    "B15": (
        "integration/test_masks.py::test_causality_probe",
        "integration/test_neighbours.py::test_a_configuration_taken_from_a_transformed_model_is_refused",
    ),
    "B16": ("integration/test_compile.py::test_prefill_of_five_lengths",),
    "B17": ("integration/test_compile.py::test_decode_of_many_steps",),
    "B18": ("integration/test_compile.py::test_prefill_of_five_lengths",),
    "B20": (
        "integration/test_exactness.py::test_sites_are_rewritten_or_skipped_with_the_right_reason",
    ),
    "B21": ("passes/test_fuzz.py::test_every_variant_is_counted",),
    "B22": ("integration/test_exactness.py::test_counts_follow_the_number_of_layers",),
    "B23": (
        "integration/test_exactness.py::test_sites_are_rewritten_or_skipped_with_the_right_reason",
    ),
    "B26": ("integration/test_exactness.py::test_untrained_logits_equal_the_untouched_model",),
    "B27": ("integration/test_masks.py::test_padding_rows_stay_finite",),
    "B28": (
        "kernels/test_semantics.py::test_window_and_sink_boundaries",
        "integration/test_masks.py::test_window_edge_is_token_exact",
    ),
    "B30": (
        "kernels/test_semantics.py::test_cached_steps_equal_one_call",
        "integration/test_routes.py::test_each_call_routes_as_one_shot_prefill",
    ),
    "B31": ("integration/test_generate.py::test_greedy_equals_the_untouched_model",),
    "B35": ("kernels/test_gradients.py::test_head_sizes",),
    "B36": ("integration/test_exactness.py::test_untrained_logits_equal_the_untouched_model",),
    "B37": ("kernels/test_validation.py::test_heads_that_do_not_divide",),
    "B39": ("kernels/test_gradients.py::test_causality_as_a_block_list_has_the_gradients_of_full",),
    "B40": ("kernels/test_gradients.py::test_odd_lengths",),
    "B41": ("kernels/test_gradients.py::test_keys_nobody_sees_have_no_gradient",),
    "B42": ("kernels/test_gradients.py::test_odd_lengths",),
    "B44": ("kernels/test_semantics.py::test_tail_of_a_block",),
    "B48": ("kernels/test_scaling.py::test_memory_is_linear",),
    "B49": ("integration/test_compile.py::test_no_dense_mask_in_the_graph",),
    "B50": ("integration/test_compile.py::test_no_dense_mask_in_the_graph",),
    "B51": ("integration/test_compile.py::test_prefill_with_a_padding_mask",),
    "B52": ("integration/test_lifecycle.py::test_models_loaded_with_any_implementation",),
    "B53": ("kernels/test_semantics.py::test_any_strides",),
    "B56": ("integration/test_lifecycle.py::test_save_pretrained_saves_the_untouched_model",),
    "B57": ("integration/test_lifecycle.py::test_pickle_stays_transformed",),
    "B58": ("integration/test_generate.py::test_second_turn",),
    "B59": ("integration/test_compile.py::test_whole_model_export",),
    "B61": ("integration/test_training_compat.py::test_dropout_is_never_silently_dropped",),
    "B63": ("training/test_fit.py::test_the_target_is_met_from_both_ends",),
    "B66": (
        "integration/test_masks.py::test_cached_decode_equals_the_explicit_mask",
        "integration/test_more_families.py::test_scaled_positions",
    ),
    "B67": ("integration/test_generate.py::test_second_turn",),
    "B69": ("kernels/test_semantics.py::test_block_lists",),
    "B71": ("kernels/test_semantics.py::test_block_lists",),
    "B73": ("kernels/test_scaling.py::test_grouped_keys_are_never_repeated",),
    "B77": ("kernels/test_semantics.py::test_scores_beyond_float16",),
    "B78": ("kernels/test_semantics.py::test_float32_is_float32",),
    "B79": ("kernels/test_gradients.py::test_group_sizes",),
    "B82": ("integration/test_compile.py::test_decode_of_many_steps",),
}

LATER: dict[str, str] = {
    "B02": "block selection (XAttention) is not there yet",
    "B25": "passes behind a Dynamo backend are not there yet",
    "B46": "needs two GPUs",
    "B55": "needs a GPU: memory under CUDA graphs",
    "B64": "a threshold for a target sparsity is not there yet",
    "B65": "a third mode beside full and streaming is not there yet",
    "B70": "block selection (XAttention) is not there yet",
    "B72": "needs a GPU, and block selection",
    "B75": "needs a GPU: heads larger than 256",
    "B80": "needs a GPU: shared memory",
    "B81": "needs a GPU: times",
    "B84": "needs a GPU: memory under compilation",
}
"""Cases of capabilities that are not there yet, or that only a GPU shows, with the reason."""

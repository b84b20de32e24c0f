"""What users of other engines suffered, and where it is shown not to happen here, at each door.

A row is a case; a door that is missing has nothing of its own in it: what the engine decides is
shown on the engine. `test_every_case_is_tested` keeps the table true.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

GRPC, HTTP, ENGINE = "gRPC", "HTTP", "engine"
OPERATIONS = "test_operations"
LIFE, PRESSURE, PLAIN = "test_service_life", "test_service_pressure", "test_pressure_http"

CASES = {
    "1 a prompt that fits the length and not the pool": {
        GRPC: f"{PRESSURE}::test_a_prompt_larger_than_the_pool_is_refused_and_holds_nobody_up",
        HTTP: f"{PLAIN}::test_a_prompt_larger_than_the_pool_is_refused_and_holds_nobody_up",
    },
    "2 the engine stalls": {
        GRPC: f"{LIFE}::test_a_stalled_engine_is_unhealthy_until_it_moves",
        HTTP: f"{PLAIN}::test_a_stalled_engine_is_503_until_it_moves",
    },
    "2 the engine dies": {
        GRPC: f"{LIFE}::test_a_dead_engine_is_unavailable_and_unhealthy_and_says_why",
        HTTP: "test_http::test_an_engine_that_fails_is_503",
        "process": f"{OPERATIONS}::test_the_process_of_a_failed_engine_ends_with_3_and_its_reason",
    },
    "3 the client leaves after the first chunk": {
        GRPC: "test_service_leaving::test_a_client_that_cancels_frees_its_slot",
        HTTP: "test_http::test_a_client_that_leaves_ends_its_request",
        "metrics": "test_metrics::test_who_leaves_is_counted_as_aborted_with_what_it_came_to",
    },
    "3 the client is killed": {
        GRPC: "test_service_leaving::test_a_client_that_dies_frees_its_slot",
        HTTP: f"{PLAIN}::test_a_client_that_is_killed_frees_its_slot",
    },
    "4 ids outside of the vocabulary": {
        GRPC: "test_service_refusals::test_bad_input_is_named_and_the_engine_goes_on",
        HTTP: f"{PLAIN}::test_what_is_out_of_range_is_named_and_the_engine_goes_on",
    },
    "5 stop strings beside characters of several tokens": {
        GRPC: "test_service_demo::test_streamed_text_is_unary_text_whatever_the_bytes",
        HTTP: f"{PLAIN}::test_streamed_text_is_unary_text_up_to_a_stop_string",
        ENGINE: "test_detokenizer::test_stop_strings_do_not_depend_on_how_the_text_is_cut",
    },
    "6 cold, and with a prefix hit": {
        GRPC: "test_doors_agree::test_both_doors_give_the_same_bits_in_any_company",
        HTTP: "test_doors_agree::test_both_doors_give_the_same_bits_in_any_company",
        ENGINE: "test_determinism::test_after_a_prefix_hit",
    },
    "7 alone, and among others": {
        GRPC: "test_doors_agree::test_both_doors_give_the_same_bits_in_any_company",
        HTTP: "test_doors_agree::test_both_doors_give_the_same_bits_in_any_company",
        ENGINE: "test_determinism::test_alone_and_in_company_all_bits_are_the_same",
    },
    "8 2,000 requests with random lengths and cancels, overlapped": {
        ENGINE: "test_determinism::test_soak_of_2000_requests_overlapped_equals_synchronous",
    },
    "9 penalties with overlap and preemption": {
        ENGINE: "test_engine_prefix::test_options_after_a_hit",
        "preempted": "test_engine_prefix::test_pressure_evicts_and_preempts_and_changes_nothing",
    },
    "10 slots held by the less urgent": {
        GRPC: f"{PRESSURE}::test_all_slots_held_by_low_ones_and_an_urgent_one_comes",
        HTTP: f"{PLAIN}::test_all_slots_held_by_low_ones_and_an_urgent_one_comes",
        ENGINE: "test_scheduling::test_ageing_lets_the_low_ones_through",
    },
    "11 the first use of an option after READY": {
        GRPC: "test_doors_agree::test_both_doors_give_the_same_bits_in_any_company",
        HTTP: "test_doors_agree::test_both_doors_give_the_same_bits_in_any_company",
        ENGINE: "test_programs::test_the_set_is_closed",
    },
    "12 many more requests than the queue takes": {
        GRPC: f"{PRESSURE}::test_ten_thousand_requests_at_once_and_a_queue_of_a_hundred",
        HTTP: f"{PLAIN}::test_four_hundred_requests_at_once_and_a_queue_of_twenty",
    },
    "13 every way to end": {
        GRPC: f"{PRESSURE}::test_aborted_expired_late_refused_and_finished_ones_balance",
        HTTP: f"{PLAIN}::test_aborted_expired_refused_failed_and_finished_ones_balance",
    },
    "14 output limits": {
        GRPC: "test_service_refusals::test_bad_input_is_named_and_the_engine_goes_on",
        HTTP: f"{PLAIN}::test_what_is_out_of_range_is_named_and_the_engine_goes_on",
        "absent": "test_validation::test_absent_max_new_tokens_is_up_to_the_limit",
    },
    "15 prompts of the model's length": {
        GRPC: "test_service_refusals::test_prompts_at_the_limit",
        HTTP: f"{PLAIN}::test_defined_results_at_the_edges_of_sampling_and_of_lengths",
    },
    "16 defects of checkpoints": {
        ENGINE: "test_checkpoints::test_defects_of_hugging_face_folders",
        "GGUF": "test_checkpoints::test_lying_gguf_offsets_and_sizes",
        "command": "test_cli_serve::test_a_model_that_cannot_be_loaded_is_one_line",
    },
    "17 SIGTERM with 50 running and 20 waiting": {
        GRPC: f"{LIFE}::test_draining_with_50_running_and_20_waiting",
        HTTP: f"{PLAIN}::test_draining_with_50_running_and_20_waiting",
        "process": "test_cli_serve::test_a_process_serves_drains_on_sigterm_and_leaves_with_0",
    },
    "18 a port that is taken or forbidden, a key that does not match": {
        GRPC: "test_cli_serve::test_the_port_is_checked_before_the_model",
        HTTP: "test_cli_serve::test_the_port_is_checked_before_the_model",
        "forbidden": "test_cli_serve::test_what_cannot_be_listened_on_is_explained",
        "TLS": "test_access::test_files_that_are_no_certificates_are_named",
    },
    "19 grammars that are hard to read": {
        GRPC: "test_rules_wire::test_what_cannot_be_is_named_over_grpc",
        HTTP: "test_rules_wire::test_what_cannot_be_is_named_over_http",
        ENGINE: "test_grammar_process::test_what_takes_too_long_is_ended_and_the_others_go_on",
    },
    "20 the edges of sampling": {
        GRPC: "test_service_demo::test_defined_results_at_the_edges_of_sampling",
        HTTP: f"{PLAIN}::test_defined_results_at_the_edges_of_sampling_and_of_lengths",
    },
    "slow readers": {
        GRPC: "test_slow_readers::test_a_reader_that_stops_slows_itself_alone",
        HTTP: "test_slow_readers::test_a_reader_that_stops_slows_itself_alone",
    },
    "certificates that are not to be trusted": {
        GRPC: "test_tls_doors::test_a_certificate_that_is_wrong_is_not_trusted",
        HTTP: "test_tls_doors::test_a_certificate_that_is_wrong_is_not_trusted",
    },
}


@cache
def functions_of(module: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, functions)}


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_tested(case):
    for door, place in CASES[case].items():
        module, name = place.split("::")
        assert name in functions_of(module), (door, place)
    assert {number.split()[0] for number in CASES} >= {str(number) for number in range(1, 21)}

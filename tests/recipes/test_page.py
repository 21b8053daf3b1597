"""Rows of the page on moving from TorchRL: each has a test that exists, and rows only become more."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/moving/torchrl.md"
TRANSFORMS = "tests/transforms/test_torchrls_transforms.py::test_as_in_torchrls_buffer"
FAMILY = "tests/buffer/test_trainers.py::test_a_trainer_of_each_family"
RECIPE = "tests/recipes/test_recipes.py::test_a_recipe_of_torchrls"
#: What the first cell of a row begins with, and a test of it. Add rows; take none away but what was found to be false.
HELD = {
    "`dqn/dqn_cartpole.py`": RECIPE,
    "`ddpg/ddpg.py`": RECIPE,
    "`ppo/ppo_mujoco.py`": RECIPE,
    "`iql/iql_online.py`": RECIPE,
    "`iql/iql_offline.py`": RECIPE,
    "`dreamer/dreamer.py`": RECIPE,
    "`Collector`": "tests/buffer/test_collectors.py::test_collectors_with_an_env_creator",
    "`DQNTrainer`": FAMILY,
    "`Trainer` with": "tests/buffer/test_trainers.py::test_a_trainer_is_saved_and_goes_on",
    "`OfflineToOnlineTrainer`": "tests/members/test_offline_to_online.py::test_hooks_of_torchrls_trainer_save_and_anneal_the_share",
    "`MultiStepTransform`": TRANSFORMS,
    "`CatFrames`": TRANSFORMS,
    "`ActionChunkTransform`": TRANSFORMS,
    "`Reward2GoTransform`": TRANSFORMS,
    "`NextStateReconstructor`": TRANSFORMS,
    "`NextObservationDelta`": TRANSFORMS,
    "`BurnInTransform`": TRANSFORMS,
    "`PolicyAgeFilter`": TRANSFORMS,
    "`MCAdvantage`": TRANSFORMS,
    "`RandomCropTensorDict`": "tests/transforms/test_torchrls_transforms.py::test_a_random_piece_of_every_window",
    "`PinMemoryTransform`": "tests/transforms/test_torchrls_transforms.py::test_pinning_is_asked_for",
    "`VecNormV2`": (
        "tests/transforms/test_torchrls_transforms.py::test_statistics_of_the_second_kind_are_of_environments_only"
    ),
    "`TopKRewardSelector`": "tests/transforms/test_torchrls_transforms.py::test_the_best_answers_to_each_prompt",
}
#: The same of the table of differences: each row has one.
DIFFERS = {
    "importance weights |": "tests/samplers/test_normalize.py::test_one_row_near_0_does_not_hide_the_others",
    "goals of `HERReplayBuffer` by default": (
        "tests/around/test_hindsight_goals.py::test_default_goals_are_those_that_actions_reached"
    ),
    "ends of rows that `HERReplayBuffer` relabels": (
        "tests/around/test_hindsight_goals.py::test_ends_follow_from_the_new_goal"
    ),
    "windows of rows that have ids and end flags": (
        "tests/samplers/test_slice_boundaries.py::test_ends_and_ids_of_the_rows_given"
    ),
    "`SliceSampler()` where `done`": "tests/samplers/test_stored_ends.py::test_every_stored_end_counts",
    "`rb[0:3] = rows` with a new field": "tests/buffer/test_row_access.py::test_rows_by_number_take_no_new_field",
    "dumps of float8 fields": "tests/storages/test_small_floats.py::test_what_is_saved_is_loaded",
    "a directory store after a crash": "tests/buffer/test_open.py::test_components_come_back_whoever_wrote_before_a_crash",
    "rows of an environment with several copies": (
        "tests/buffer/test_loops_beside_torchrl.py::test_dreamers_windows_in_order"
    ),
    "`TensorDictPrioritizedReplayBuffer(": FAMILY,
    "a late priority update": "tests/samplers/test_priority_updates.py::test_updates_of_rows_rewritten_since_are_dropped_and_counted",
    "`ReplayBufferEnsemble`": "tests/members/test_beside_torchrl.py::test_batches_have_the_same_form",
    "`RayReplayBuffer`": "tests/cluster/test_ray.py::test_torchrl_spells_it_service_backend_and_its_collector_writes_into_it",
    "`RemoteTensorDictReplayBuffer`": "tests/buffer/test_remote_class.py::test_its_signature_is_that_of_torchrl",
    "goals of `HERReplayBuffer` in a full ring": (
        "tests/around/test_hindsight.py::test_each_goal_that_may_be_comes_equally_often"
    ),
    "`HERReplayBuffer` with slices": "tests/around/test_hindsight.py::test_windows_have_one_goal_each",
    "`end_key` of `HERReplayBuffer`": "tests/around/test_hindsight_end_key.py::test_an_end_key_that_was_named_must_be_stored",
    "`reward_fn` of `HERReplayBuffer`": "tests/around/test_hindsight.py::test_transforms_run_after_it",
    "several `done` flags in a row": "tests/samplers/test_several_flags.py::test_windows_end_where_the_flags_say",
    "`Sequence` around the rows of a sampler": "tests/around/test_sequence.py::test_are_those_of_torchrl",
    "`SliceSampler(fragmented=True)`": "tests/samplers/test_fragmented.py::test_runs_are_those_of_a_sort",
    "`PromptGroupSampler`, `LazyStackStorage`": "tests/samplers/test_prompt_groups_of_lists.py::test_a_list_without_a_bound_is_refused",
    "`PromptGroupSampler(samples_per_group=n)` where a group has fewer rows": (
        "tests/samplers/test_prompt_groups_complete.py::test_incomplete_groups_are_drawn_where_asked_for"
    ),
    "`StreamingSliceSampler` |": "tests/samplers/test_streaming.py::test_columns_have_windows_of_their_own",
    "`SliceSamplerWithoutReplacement(shuffle=False)` in a full ring": (
        "tests/samplers/test_slices_epoch.py::test_without_shuffling_the_oldest_trajectory_comes_first"
    ),
    "`sample(n)` with `prefetch`": "tests/buffer/test_prefetching_ends.py::test_another_batch_size",
    "`rb[:] = data` with a new field": "tests/buffer/test_added_fields.py::test_what_a_process_writes_meanwhile_is_filled",
    "dumps of `CompressedListStorage`": "tests/torchrl/test_torchrl_compressed.py::test_items_are_as_they_were",
    "`dumps` into the folder of the live storage": (
        "tests/buffer/test_dump_folders.py::test_the_storage_that_is_written_to_is_never_the_dump"
    ),
    "`state_dict()` of lists": "tests/torchrl/test_torchrl_list_states.py::test_items_and_cursor_go_on",
    "`StreamingSliceSampler.load_state_dict`": "tests/samplers/test_streaming.py::test_a_state_of_other_rows_begins_again",
    "`checkpointer=`, `TED2Flat` and the like": "tests/torchrl/layouts/test_layouts.py::test_what_would_be_lost_is_refused",
    "`trajectory_key` of `rb.query`": "tests/query/test_query.py::test_another_field_tells_trajectories_apart",
    "transforms of batches of windows": "tests/buffer/test_window_marks.py::test_of_every_sampler",
    "`end_streams` where ids differ": "tests/members/test_writing.py::test_streams_whose_rows_have_ids_are_ended_too",
    "`SamplerWithoutReplacement` beside writes": (
        "tests/samplers/test_epoch_beside_writes.py::test_an_epoch_ends_while_rows_arrive"
    ),
    "`SliceSamplerWithoutReplacement` beside writes": (
        "tests/samplers/test_slices_epoch_beside_writes.py::test_an_epoch_ends_while_trajectories_arrive"
    ),
    "forked or spawned samplers with one seed": "tests/test_processes_draw_apart.py::test_forked_samplers",
    "`dim_extend` with `ndim > 1`": "tests/buffer/test_dim_extend.py::test_rows_are_written_and_read_as_by_torchrl",
    "`update_priority` of windows": "tests/samplers/test_priorities_of_windows.py::test_flat",
    "`extend` of no rows": "tests/buffer/test_no_rows.py::test_of_every_kind",
    "rows without fields": "tests/buffer/test_no_rows.py::test_rows_without_fields_are_for_lists",
    "strings and other objects": "tests/buffer/test_kinds_of_items.py::test_objects_are_for_lists",
    "items of several batch sizes": "tests/buffer/test_kinds_of_items.py::test_items_of_several_batch_sizes",
    "`rb[0:3] = 1.5` of rows": "tests/storages/test_shapes_of_edits.py::test_a_number_that_a_field_does_not_hold_changes_nothing",
    "a dump or state of a tensor storage": (
        "tests/torchrl/test_torchrl_states.py::test_rows_of_tensors_load_into_a_buffer_that_was_given_no_storage"
    ),
    "`ReplayBuffer(size)` without a storage": "tests/buffer/test_default_storage.py::test_dicts_are_columns",
    "`empty()` before the first batch": "tests/storages/test_emptied_fields.py::test_the_first_real_rows_say_the_fields",
    "`patch` of `update_if_present`": "tests/storages/test_shapes_of_edits.py::test_a_patch_is_laid_out_as_the_index_or_as_the_data",
    "`rb[:, a:b] = row`": "tests/storages/test_shapes_of_edits.py::test_values_are_broadcast_as_torch_does",
    "`CompressedListStorage` before": "tests/storages/test_compressed.py::test_zlib_where_there_is_no_zstandard",
    "rows that lack a field of the first row": "tests/storages/test_structure.py::test_tensordicts_that_do_not_fit",
    "a missing rank key of": "tests/writers/test_max_value.py::test_the_default_key_is_the_next_reward",
    "an argument that is not supported": (
        "tests/test_unsupported.py::test_unknown_arguments_are_refused_whatever_they_are"
    ),
}
#: The same of the table of places where TorchRL asks for its own classes.
ASKS = {
    "`LinearScheduler`, `StepScheduler`": "tests/recipes/test_moving.py::test_schedulers_ask_for_torchrls_classes",
    "the data set for TRL": "tests/recipes/test_moving.py::test_what_asks_for_torchrls_buffers",
    "`ReplayBuffer(storage=, sampler=, writer=)` of TorchRL": (
        "tests/recipes/test_moving.py::test_torchrls_buffers_take_its_components_only"
    ),
    "`ReplayBufferEnsemble` of TorchRL": "tests/recipes/test_moving.py::test_what_asks_for_torchrls_buffers",
    "`TensorDictMap`": "tests/recipes/test_moving.py::test_what_asks_for_torchrls_buffers",
    "`ReplayBufferTrainer` of a `ReplayBuffer`": (
        "tests/recipes/test_moving.py::test_a_trainer_of_untyped_rows_updates_no_priorities"
    ),
    "trainers of PPO and A2C": "tests/recipes/test_moving.py::test_trainers_of_ppo_and_a2c_warn_and_run",
}
HELD |= DIFFERS | ASKS


@pytest.mark.parametrize("row", HELD)
def test_a_row_is_there_and_so_is_its_test(row):
    assert re.search(rf"^\| {re.escape(row)}", PAGE.read_text(), re.MULTILINE), row
    file, _, function = HELD[row].partition("::")
    names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert function in names


def test_each_difference_is_held():
    section = PAGE.read_text().split("## What differs")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|].*)", section, re.MULTILINE)
    assert len(rows) == len(DIFFERS)
    assert [row for row in rows if not row.startswith(tuple(DIFFERS))] == []

"""Put one fault at a time into a copy of the sources; a named test must fail for each.

Run: `python tests/mutants.py [part of a name]`, or `make mutants`. A mutant that survives, a test that fails without
the fault, or a text that is no longer in the file ends the run with an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in a file below src/whence, and `test` must notice."""

    name: str
    file: str
    old: str
    new: str
    test: str


ATTRIBUTION, ENGINES, OBJECTIVES = "test_attribution.py", "test_engines.py", "test_objectives.py"
SB3, CALLBACK, SELECTION = "test_sb3.py", "test_callback.py", "test_selection.py"
PROCESSES = "test_llm_processes.py"
LANGUAGE = "test_llm_engines.py"
ON_PAPER = f"{ATTRIBUTION}::test_two_records_of_a_softmax_policy_on_paper"
LEFT_OUT = f"{ATTRIBUTION}::test_score_is_the_limit_of_leaving_the_record_out_of_one_sgd_step"

MUTANTS = (
    Mutant("sign of the target", "targets.py", '(single("log_prob", outputs', '(-single("log_prob", outputs', ON_PAPER),
    Mutant(
        "sum for mean in the target", "targets.py", "records.advantages).mean()", "records.advantages).sum()", ON_PAPER
    ),
    Mutant("mean for sum in a layer", "engines/rules.py", "weighted.sum(0)", "weighted.mean(0)", ENGINES),
    Mutant(
        "no Bessel's correction",
        "objectives.py",
        "correction=1",
        "correction=0",
        f"{OBJECTIVES}::test_normalisation_over_the_buffer_has_bessels_correction",
    ),
    Mutant(
        "no clipping",
        "objectives.py",
        "clipped * records.advantages)",
        "ratio * records.advantages)",
        f"{OBJECTIVES}::test_clipped_surrogate_by_hand",
    ),
    Mutant(
        "sign of the value term",
        "objectives.py",
        "values - self.vf_coef",
        "values + self.vf_coef",
        f"{OBJECTIVES}::test_entropy_and_value_terms_by_hand",
    ),
    Mutant(
        "target reads normalised advantages",
        "attribution.py",
        "Problem(view, modules, own, params, records,",
        "Problem(view, modules, own, params, prepared,",
        ON_PAPER,
    ),
    Mutant("ghost forgets the bias", "engines/rules.py", "linear(x, weight, bias))", "linear(x, weight))", ENGINES),
    Mutant(
        "ghost scores with the target's weights",
        "engines/ghost.py",
        "g, gradients, own)",
        "g, gradients, weights[0])",
        ENGINES,
    ),
    Mutant(
        "ghost keeps the target's weights in the scores",
        "engines/ghost.py",
        "return own / weights if",
        "return own if",
        LEFT_OUT,
    ),
    Mutant(
        "ghost divides by weights of zero",
        "engines/ghost.py",
        "return own / weights if sizes.min() > 1e-12 * sizes.max() else None",
        "return own / weights",
        f"{ENGINES}::test_records_that_the_target_gives_no_weight_are_scored_all_the_same",
    ),
    Mutant(
        "ghost leaves out direct parameters",
        "engines/ghost.py",
        "if not along:",
        "if along:",
        f"{ENGINES}::test_parameters_used_directly",
    ),
    Mutant(
        "ghost does not look for use outside a layer",
        "engines/ghost.py",
        "used[name] > seen[name]",
        "False",
        f"{ENGINES}::test_ghost_refuses_what_it_would_get_wrong",
    ),
    Mutant(
        "groups ignored",
        "engines/rules.py",
        "layer.dilation, layer.groups)",
        "layer.dilation, 1)",
        f"{ENGINES}::test_convolutions",
    ),
    Mutant(
        "aliases swapped back wrongly",
        "policies.py",
        "slot.holder[slot.key] = slot.parameter",
        "pass",
        f"{SB3}::test_a_view_reads_the_parameters_it_is_given_and_puts_the_policys_own_back",
    ),
    Mutant(
        "environment order",
        "sb3/buffer.py",
        "array.swapaxes(0, 1).reshape",
        "array.reshape",
        f"{SB3}::test_rows_are_in_the_order_of_the_flattened_buffer",
    ),
    Mutant(
        "off-by-one record id",
        "sb3/buffer.py",
        "model.num_timesteps - steps * envs",
        "model.num_timesteps - steps * envs + 1",
        f"{SB3}::test_a_snapshot_is_environment_by_environment_and_ids_are_time_steps",
    ),
    Mutant(
        "stale advantages",
        "sb3/buffer.py",
        "advantages=_flat(buffer.advantages)",
        "advantages=_flat(buffer.returns)",
        f"{SB3}::test_rows_are_in_the_order_of_the_flattened_buffer",
    ),
    Mutant(
        "permutation of the kept only",
        "sb3/buffer.py",
        "order = order[keep[order]]",
        "order = np.flatnonzero(keep)",
        f"{SB3}::test_get_yields_the_kept_records_in_sb3s_order",
    ),
    Mutant(
        "the dropped are trained on",
        "sb3/buffer.py",
        "order = order[keep[order]]",
        "order = order[~keep[order]]",
        f"{CALLBACK}::test_rounds_that_keep_few_records_train_or_are_skipped",
    ),
    Mutant(
        "a last record alone stays alone",
        "sb3/buffer.py",
        "len(batches[-1]) == 1 and join",
        "False",
        f"{SB3}::test_minibatches",
    ),
    Mutant(
        "filter not removed",
        "sb3/buffer.py",
        "del buffer.get ",
        "pass ",
        f"{SB3}::test_the_buffers_own_get_is_back_after_an_exception",
    ),
    Mutant(
        "a selection outlives its rollout",
        "sb3/training.py",
        "if self.rollout_buffer.rewards is rollout:",
        "if True:",
        f"{CALLBACK}::test_a_selection_does_not_outlive_a_rollout_that_was_never_trained_on",
    ),
    Mutant(
        "a round of one is trained on",
        "sb3/callback.py",
        'if not metrics["skipped"]:',
        "if True:",
        f"{CALLBACK}::test_rounds_that_keep_few_records_train_or_are_skipped",
    ),
    Mutant(
        "NumPy's generator not restored",
        "guards.py",
        "np.random.set_state(array)",
        "array",
        f"{SB3}::test_scoring_changes_nothing_also_when_it_raises",
    ),
    Mutant(
        "modes not restored",
        "guards.py",
        "module.training = True",
        "pass",
        f"{SB3}::test_scoring_changes_nothing_also_when_it_raises",
    ),
    Mutant(
        "IIF drops the highest",
        "selection.py",
        "lowest = ascending(scores, ",
        "lowest = ascending(-scores, ",
        f"{SELECTION}::test_iif_drops_the_lowest_of_the_negative",
    ),
    Mutant(
        "zero counts as negative",
        "selection.py",
        "int((scores < 0).sum())",
        "int((scores <= 0).sum())",
        f"{SELECTION}::test_all_negative_are_dropped_at_one_and_zero_is_not_negative",
    ),
    Mutant(
        "share not rounded before it is cut off",
        "selection.py",
        "math.floor(round(share * candidates, 9))",
        "math.floor(share * candidates)",
        f"{SELECTION}::test_the_share_is_rounded_down_and_not_by_floating_point",
    ),
    Mutant(
        "ties by position",
        "influence.py",
        "by_id = record_ids.argsort()",
        "by_id = torch.arange(len(record_ids))",
        f"{SELECTION}::test_of_equal_scores_the_lower_id_goes_first",
    ),
    Mutant(
        "never reached counts as R",
        "experiments/metrics.py",
        "else curve.rounds + 1",
        "else curve.rounds",
        "test_metrics.py",
    ),
    Mutant(
        "untrained policy counts as a round",
        "experiments/metrics.py",
        "curve.returns[1:] >= level",
        "curve.returns >= level",
        "test_metrics.py",
    ),
    Mutant(
        "a seed is its own null",
        "experiments/metrics.py",
        "np.fill_diagonal(table, np.nan)",
        "pass",
        "test_metrics.py",
    ),
    Mutant(
        "a jackknife that forgets how many seeds there are",
        "experiments/metrics.py",
        "(len(group) - 1) * float(np.var(known))",
        "float(np.var(known))",
        "test_metrics.py::TestSummarise::test_the_null_of_different_standard_seeds_by_hand",
    ),
    Mutant(
        "a null that does not know which seed is left out",
        "experiments/metrics.py",
        "of_arm(methods, standards), of_null(standards)",
        "of_arm(methods, standards), of_null(standards | True)",
        "test_metrics.py::TestSummarise::test_over_the_null_a_standard_seed_counts_in_both",
    ),
    Mutant(
        "the paper's time to a peak of ours",
        "experiments/metrics.py",
        "seconds_to(method, float(literal[-1]))",
        "seconds_to(method, float(levels(standard)[-1]))",
        "test_metrics.py::TestPairMetrics::test_the_peak_is_the_highest_level_not_the_highest_return",
    ),
    Mutant(
        "generators of evaluation not guarded",
        "experiments/environments.py",
        "with kept_generators(), eval_mode(model.policy.modules()),",
        "with eval_mode(model.policy.modules()),",
        "test_experiments.py -k evaluate",
    ),
    Mutant(
        "evaluation draws from the training's generators",
        "experiments/environments.py",
        "with kept_generators(), eval_mode",
        "with eval_mode",
        "test_experiments.py -k plain_ppo",
    ),
    Mutant(
        "generator's state noted after the reset",
        "sb3/episodes.py",
        """        before = {"seed": seed} if seed is not None else self.env.unwrapped.np_random.bit_generator.state
        observation, info = self.env.reset(seed=seed, options=options)
""",
        """        observation, info = self.env.reset(seed=seed, options=options)
        before = {"seed": seed} if seed is not None else self.env.unwrapped.np_random.bit_generator.state
""",
        "test_experiments.py -k Replay",
    ),
    Mutant(
        "an unfinished run counts as finished",
        "experiments/training.py",
        "== len(evaluated_rounds(config))",
        ">= 1",
        "test_experiments.py -k TestRun",
    ),
    Mutant(
        "files written in place",
        "guards.py",
        """    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
""",
        "    yield path\n",
        "test_runs.py::test_a_killed_writer_leaves_a_run_that_opens_and_reads",
    ),
    Mutant(
        "text in pages not escaped",
        "report/page.py",
        "autoescape=True",
        "autoescape=False",
        "test_report.py::TestPage::test_hostile_text_stays_text",
    ),
    Mutant(
        "batch norm forgets its running mean",
        "engines/rules.py",
        "batch_norm(x, layer.running_mean,",
        "batch_norm(x, torch.zeros_like(layer.running_mean),",
        f"{ENGINES}::test_batch_norm_in_eval_mode_is_a_layer_like_others",
    ),
    Mutant(
        "batch norm in training mode is let pass",
        "policies.py",
        "(module.training or module.running_mean is None)",
        "module.running_mean is None",
        f"{ENGINES}::test_batch_norm_in_training_mode_is_refused_with_the_reason",
    ),
    Mutant(
        "vmap takes the mean over parameters",
        "engines/vmap.py",
        "torch.stack(products).sum(0)",
        "torch.stack(products).mean(0)",
        f"{ENGINES}::test_layers_called_twice_and_tied_weights",
    ),
    Mutant(
        "targets' gradients change places",
        "engines/ghost.py",
        "for target in problem.targets\n    ]",
        "for target in reversed(problem.targets)\n    ]",
        f"{ENGINES}::test_sb3_policies_score_as_the_loop_does[PPO-vector-discrete-True]",
    ),
    Mutant(
        "action masks are not applied",
        "sb3/policy.py",
        "if masks is not None:",
        "if masks is None:",
        f"{SB3}::test_the_view_of_a_maskable_policy_reads_the_masks",
    ),
    Mutant(
        "environment order of dicts",
        "sb3/buffer.py",
        "{key: _flat(array) for",
        "{key: torch.from_numpy(array.reshape(-1, *array.shape[2:])) for",
        f"{SB3}::test_rows_are_in_the_order_of_the_flattened_buffer",
    ),
    Mutant(
        "what is released still counts",
        "engines/memory.py",
        "self._change, -storage.nbytes())",
        "self._change, 0)",
        "test_memory.py::test_the_meter_counts_what_lives",
    ),
    Mutant(
        "no margin for the allocator",
        "engines/memory.py",
        "cost.kept * total) / _MARGIN)",
        "cost.kept * total))",
        "test_memory.py::test_what_is_held_stays_within_the_budget_for_tensors",
    ),
    Mutant(
        "the whole round is prepared at once",
        "engines/problem.py",
        'if "inputs" in self.__dict__ else None',
        "if True else None",
        "test_memory.py::test_a_small_budget_gives_the_same_scores",
    ),
    Mutant(
        "views that close over something share what is known of them",
        "policies.py",
        "if codes and None not in codes:",
        "if codes:",
        "test_memory.py::test_views_and_objectives_have_costs_of_their_own",
    ),
    Mutant(
        "all objectives cost the same",
        "engines/memory.py",
        "_made_of(problem.objective)",
        "None",
        "test_memory.py::test_views_and_objectives_have_costs_of_their_own",
    ),
    Mutant(
        "an axis is confirmed for layers not trained yet",
        "engines/ghost.py",
        "problem.columns, trained)",
        "problem.columns)",
        f"{ENGINES}::test_an_axis_is_confirmed_anew_where_other_layers_are_trained",
    ),
    Mutant(
        "any action will do",
        "targets.py",
        "or not space.contains(whole.reshape(space.shape).numpy())",
        "or False",
        f"{ATTRIBUTION}::test_an_action_outside_the_policys_space_is_refused",
    ),
    Mutant(
        "weights of zero pass",
        "selection.py",
        "not self.weights.any()",
        "False",
        f"{SELECTION}::test_a_selection_is_checked",
    ),
    Mutant(
        "the check compares with nothing",
        "checks.py",
        "(found - truth).abs()",
        "(found - found).abs()",
        "test_checks.py::test_a_wrong_rule_shows",
    ),
    Mutant(
        "warm-up ends a round early",
        "selection.py",
        "    if progress.round <= warmup:",
        "    if progress.round < warmup:",
        f"{SELECTION}::test_nothing_is_dropped_while_warming_up",
    ),
    Mutant(
        "progress is that of the round before",
        "sb3/callback.py",
        "remaining = 1 - self.model.num_timesteps / self.model._total_timesteps",
        "remaining = self.model._current_progress_remaining",
        f"{CALLBACK}::test_a_rule_is_told_how_far_training_has_come",
    ),
    Mutant(
        "below zero for below the mean",
        "selection.py",
        "scores < scores.mean()",
        "scores < 0",
        f"{SELECTION}::test_below_mean_drops_the_lowest_of_those_below_the_mean",
    ),
    Mutant(
        "zero counts as positive",
        "selection.py",
        "(scores <= 0).nonzero()",
        "(scores < 0).nonzero()",
        f"{SELECTION}::test_nonpositive_drops_zero_too",
    ),
    Mutant(
        "negative-random draws from all",
        "selection.py",
        "else scores < 0\n    negative",
        "else scores < 9e9\n    negative",
        f"{SELECTION}::test_negative_random_draws_from_the_negative_alone",
    ),
    Mutant(
        "an episode's first record counts as the last one's next",
        "advantages.py",
        "~starts[1:] & (env_index",
        "~starts[:-1] & (env_index",
        "test_heuristics.py::test_td_errors_by_hand",
    ),
    Mutant(
        "records that agree are dropped",
        "heuristics.py",
        "np.sign(estimate) != np.sign(given)",
        "np.sign(estimate) == np.sign(given)",
        "test_heuristics.py::test_records_that_disagree_with_their_return_are_dropped",
    ),
    Mutant(
        "EnvPool's next episode begins a step late",
        "sb3/fast.py",
        'part[about["env_id"]] = fresh',
        "fresh",
        "test_fast.py::test_the_first_observation_after_an_end_is_the_next_episodes",
    ),
    Mutant(
        "gSDE's noise outlives the episode",
        "sb3/noise.py",
        "np.where(starts, 0, ages[envs] + 1)",
        "ages[envs] + 1",
        "test_fast.py -k noise",
    ),
    Mutant(
        "gSDE's noise is shared in evaluations",
        "sb3/noise.py",
        "matrices[due] = policy.action_dist.exploration_matrices",
        "matrices[due] = policy.action_dist.exploration_mat",
        "test_fast.py -k noise",
    ),
    Mutant(
        "a second selection takes the first one's place",
        "sb3/training.py",
        "    if taken:\n",
        "    if False:\n",
        f"{CALLBACK}::test_two_selections_from_one_rollout_are_refused",
    ),
    Mutant(
        "an end counts as a time limit",
        "sb3/fast.py",
        "bool(truncated[env] and not terminated[env])",
        "bool(terminated[env])",
        "test_fast.py::test_a_grid_without_chance_is_stepped_alike",
    ),
    Mutant(
        "actions of a box of one are broadcast",
        "sb3/policy.py",
        ".to(dtype).reshape(len(records), -1)",
        ".to(dtype)",
        f"{SB3}::test_actions_of_a_box_of_one_may_come_without_their_axis",
    ),
    Mutant(
        "advice is repeated",
        "sb3/callback.py",
        "if one.kind not in self._advised:",
        "if True:",
        "test_advice.py::test_the_callback_says_each_thing_once",
    ),
    Mutant(
        "a curve looks ahead to the next evaluation",
        "experiments/curves.py",
        'side="right") - 1',
        'side="left")',
        "test_fast.py::test_a_curve_stays_at_the_last_evaluation",
    ),
    Mutant(
        "a stored round forgets its parameters",
        "sb3/rounds.py",
        "tensor.copy_(tensors[name])",
        "tensors[name]",
        "test_train.py::test_a_round_is_scored_again_as_it_was",
    ),
    Mutant(
        "settings of an environment replace the preset's",
        "experiments/plan.py",
        '"env_kwargs", "pool_kwargs", "policy_kwargs")',
        '"pool_kwargs", "policy_kwargs")',
        "test_experiments.py -k merged_with_the_presets",
    ),
    Mutant(
        "an action is cut off unseen",
        "experiments/plan.py",
        "not np.array_equal(array, converted)",
        "False",
        "test_experiments.py -k do_not_hold",
    ),
    Mutant(
        "libraries whose spaces differ",
        "experiments/environments.py",
        "if _form(mine) != _form(other):",
        "if False:",
        "test_experiments.py -k spaces",
    ),
    Mutant(
        "a warm-up that no rule reads",
        "experiments/plan.py",
        "replace(config, warmup=2).rule()",
        "None",
        "test_experiments.py -k what_each_arm_reads",
    ),
    Mutant(
        "not a number in JSON",
        "cli/output.py",
        "None if isinstance(value, float) and not math.isfinite(value) else value",
        "value",
        "test_train.py -k null_in_json",
    ),
    Mutant(
        "the trial update's optimiser state left in place",
        "sb3/rounds.py",
        "        policy.optimizer.load_state_dict(optimizer)\n",
        "",
        "test_controls.py::test_where_all_is_kept_it_is_ppo",
    ),
    Mutant(
        "an update's norm matched upside down",
        "experiments/controls.py",
        "wanted / made if made",
        "made / wanted if made",
        "test_controls.py::test_it_goes_where_ppo_goes_as_far_as_the_selection_would",
    ),
    Mutant(
        "one scale for policy and values",
        "experiments/controls.py",
        "others = frozenset(start.keys() - steering)",
        "steering, others = frozenset(start), frozenset()",
        "test_controls.py::test_it_goes_where_ppo_goes_as_far_as_the_selection_would",
    ),
    Mutant(
        "a trial that is charged for",
        "experiments/controls.py",
        "with self._optimisation.paused(), kept_generators()",
        "with kept_generators()",
        "test_controls.py::test_seconds_are_those_of_the_training_that_counts",
    ),
    Mutant(
        "a trial that moves the generators",
        "experiments/controls.py",
        "paused(), kept_generators(), untouched",
        "paused(), untouched",
        "test_controls.py::test_a_trial_that_fails_leaves_the_model_as_it_was",
    ),
    Mutant(
        "momentum left out of a round's scores",
        "rounds/schedule.py",
        " + decay * carried",
        "",
        "test_rounds.py::TestScores::test_for_small_steps_of_sgd_momentum_gives_the_derivative_less_its_mean",
    ),
    Mutant(
        "weights that leave Bessel's correction out",
        "rounds/replay.py",
        "torch.where(enough, total - 1, 1.0)",
        "torch.where(enough, total, 1.0)",
        "test_rounds.py::TestReplay::test_records_of_no_weight_are_as_good_as_absent",
    ),
    Mutant(
        "an unrolled score without the optimiser's state",
        "rounds/schedule.py",
        "    return scores.detach(), before.map(Tensor.detach)",
        "    return scores.detach(), Point(before.map(Tensor.detach).params, before.map(torch.zeros_like).state)",
        "test_rounds.py::TestScores::test_unrolled_is_the_derivative_by_weights",
    ),
    Mutant(
        "subsets that share one mask",
        "counterfactual/retrain.py",
        "in_dims=(0, None if orders is None else 0, 0)",
        "in_dims=(0, None if orders is None else 0, None)",
        "test_counterfactual.py::TestRetrain::test_each_training_is_as_if_alone",
    ),
    Mutant(
        "a subset's order not filtered by its mask",
        "counterfactual/retrain.py",
        "permutation[mask[permutation]]",
        "permutation[mask]",
        "test_counterfactual.py::test_minibatches_are_cut_as_selection_cuts_them",
    ),
    Mutant(
        "a minibatch that was stopped at counted as a step",
        "sb3/rounds.py",
        "stopped=self._stepped < len(self._minibatches)",
        "stopped=False",
        "test_rounds.py::TestReplay::test_the_differentiable_replay_agrees",
    ),
    Mutant(
        "a learning rate that is not scaled",
        "experiments/training.py",
        '"learning_rate"] = scale * rate',
        '"learning_rate"] = rate',
        "test_sweep.py::test_learning_rates_are_scaled",
    ),
    Mutant(
        "another run's curve taken for this one",
        "experiments/sweep.py",
        "if others := [name for name in now if before[name] != now[name]]:",
        "if others := []:",
        "test_sweep.py::TestRunning::test_a_curve_of_another_run_is_not_taken_for_this_one",
    ),
    Mutant(
        "a sweep that ends with the first failure",
        "experiments/sweep.py",
        "failures[planned.name] = failure",
        "raise WhenceError(failure)",
        "test_sweep.py::TestRunning::test_a_run_that_fails_is_told_of_and_the_others_go_on",
    ),
    Mutant(
        "a worker's death taken for the run's end",
        "experiments/workers.py",
        'return "lost", None',
        'return "ended", None',
        "test_sweep.py::TestWorkers::test_one_that_is_killed_is_told_of",
    ),
    Mutant(
        "workers that Ctrl-C reaches",
        "experiments/workers.py",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [])",
        "test_sweep.py::TestWorkers::test_ctrl_c_does_not_reach_them",
    ),
    Mutant(
        "workers that nobody ends",
        "experiments/workers.py",
        "            process.terminate()\n",
        "",
        "test_sweep.py::TestWorkers::test_they_end_when_the_caller_breaks_off",
    ),
    Mutant(
        "a share that an arm does not read makes another run",
        "experiments/sweepfile.py",
        'if reads(own, "drop") else',
        "if True else",
        "test_sweep.py::TestReading::test_runs_are_arms_times_shares_times_seeds",
    ),
    Mutant(
        "run directories discarded in spite of --keep-runs",
        "experiments/sweep.py",
        "    if not keep_runs:\n",
        "    if True:\n",
        "test_sweep.py::TestRunning::test_run_directories_are_kept_where_that_is_asked_for",
    ),
    Mutant(
        "two sweeps on one directory",
        "experiments/sweep.py",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "test_sweep.py::TestRunning::test_a_sweep_has_its_directory_to_itself",
    ),
    Mutant(
        "a curve that lacks rounds",
        "experiments/curves.py",
        'if frames[name]["round"].to_list() != expected:',
        "if False:",
        "test_sweep.py::TestRunning::test_a_curve_is_whole",
    ),
    Mutant(
        "runs of two settings in one table",
        "experiments/sweep.py",
        "if others := differing(settings.setdefault(group, {}), label, config):",
        "if others := []:",
        "test_sweep.py::TestRunning::test_runs_of_a_name_that_differ_are_not_tabulated",
    ),
    Mutant(
        "LDA's figures beside every setting",
        "report/lda.py",
        "<= _EVALUATION",
        "<= vars(theirs).keys()",
        "test_tables.py::TestLDA::test_what_is_not_its_own_setting_has_none",
    ),
    Mutant(
        "LDA's figures beside clipped gradients",
        "report/lda.py",
        'if family == "lda-code" else {}',
        "if family else {}",
        "test_tables.py::TestLDA::test_clipped_gradients_are_told_of_and_have_none",
    ),
    Mutant(
        "one of LDA's rows for every share",
        "report/lda.py",
        'if row["drop"] == config.drop',
        "if True",
        "test_tables.py::TestLDA::test_each_share_has_its_own_row",
    ),
    Mutant(
        "the difference of another metric",
        "report/markdown.py",
        'metrics[metric]["differences"]',
        'metrics["peak_return"]["differences"]',
        "test_tables.py::TestTables::test_they_hold_what_the_summary_says",
    ),
    Mutant(
        "seconds of a mean round",
        "report/markdown.py",
        "np.median(table[column]",
        "np.mean(table[column]",
        "test_tables.py::TestTables::test_one_round_that_took_long_does_not_count",
    ),
    Mutant(
        "pictures before text",
        "report/markdown.py",
        '    _write(out / "tables.md", text)\n    if pictures:',
        "    if pictures:",
        "test_tables.py::TestPictures::test_without_a_browser_the_tables_are_there",
    ),
    Mutant(
        "rounds that are timed from their run's first",
        "cli/output.py",
        "seconds + now - self._heard[planned]",
        "seconds + now - self._begun[planned]",
        "test_tables.py::TestSweepTable::test_time_left_is_that_of_open_rounds_by_workers",
    ),
    Mutant(
        "time left as if there were one worker",
        "cli/output.py",
        "/ min(self._workers, len(still))",
        "",
        "test_tables.py::TestSweepTable::test_time_left_is_that_of_open_rounds_by_workers",
    ),
    Mutant(
        "failed runs among those left",
        "cli/output.py",
        "not in self._finished | self._failed",
        "not in self._finished",
        "test_tables.py::TestSweepTable::test_failed_runs_are_neither_finished_nor_left",
    ),
    Mutant(
        "a gain that the mean advantage takes part in",
        "counterfactual/gains.py",
        "{kind: own - own.mean() for kind, own in doubles.items()}",
        "doubles",
        "test_gains.py::test_gains_by_their_definitions",
    ),
    Mutant(
        "an update made as long as that of another selection",
        "counterfactual/gains.py",
        "norm / of_whole if",
        "of_whole / norm if",
        "test_gains.py::test_gains_by_their_definitions",
    ),
    Mutant(
        "a divergence taken for one that grows in proportion",
        "counterfactual/gains.py",
        "math.sqrt(kl / found.kl)",
        "(kl / found.kl) ** 2",
        "test_gains.py::test_gains_by_their_definitions",
    ),
    Mutant(
        "entropy as it is for its rise",
        "counterfactual/gains.py",
        "found.entropy - entropy,",
        "found.entropy,",
        "test_gains.py::test_gains_by_their_definitions",
    ),
    Mutant(
        "one count of steps for all parameters",
        "rounds/optimizers.py",
        "all(bool(count == counts[0]) for count in counts)",
        "counts",
        "test_rounds.py::test_a_step_is_torchs_also_where_parameters_have_been_stepped_on_unequally",
    ),
    Mutant(
        "fresh records of any policy",
        "counterfactual/gains.py",
        "log_probs_apart(round.view, round.named(round.start.params), fresh)) <= SAME:",
        "log_probs_apart(round.view, round.named(round.start.params), fresh)) <= 1e9:",
        "test_gains.py::test_what_is_refused",
    ),
    Mutant(
        "a recording of any policy of the same shapes",
        "rounds/identity.py",
        "    if not apart <= SAME:\n",
        "    if not apart <= 1e9:\n",
        "test_rounds.py::TestRefusals::test_another_policy_of_the_same_shapes",
    ),
    Mutant(
        "SB3's replay of any policy of the same shapes",
        "sb3/rounds.py",
        "        check_collected(view, view.parameters(), recording.records, recording.number)\n",
        "",
        "test_rounds.py::TestRefusals::test_another_policy_of_the_same_shapes",
    ),
    Mutant(
        "log-probs compared while units are dropped",
        "rounds/identity.py",
        "    with kept_generators(), eval_mode(list(view.module.modules())), torch.no_grad():\n        for first",
        "    with kept_generators(), torch.no_grad():\n        for first",
        "test_rounds.py::test_a_policy_with_dropout_is_known_by_what_it_does_without",
    ),
    Mutant(
        "log-probs compared of the last records alone",
        "rounds/identity.py",
        "            total += float(",
        "            total = float(",
        "test_rounds.py::test_log_probs_are_compared_part_by_part",
    ),
    Mutant(
        "parameters of several dtypes made one",
        "rounds/replay.py",
        "if len(dtypes := {p.dtype for p in params.values()}) > 1:",
        "if len(dtypes := {p.dtype for p in params.values()}) > 9:",
        "test_rounds.py::test_parameters_of_several_dtypes_are_refused",
    ),
    Mutant(
        "a filled up minibatch that trains on the last record",
        "counterfactual/retrain.py",
        "weights.new_zeros(len(weights), 1)",
        "weights.new_ones(len(weights), 1)",
        "test_counterfactual.py::test_subsets_of_different_sizes_are_trained_as_if_alone",
    ),
    Mutant(
        "records that score below 0 kept and the others left out",
        "counterfactual/interventions.py",
        "filtered = scores >= 0",
        "filtered = scores < 0",
        "test_interventions.py::TestIntervene::test_what_is_kept",
    ),
    Mutant(
        "a random drop of another number",
        "counterfactual/interventions.py",
        "[: int((~filtered).sum())]",
        "[: int(filtered.sum())]",
        "test_interventions.py::TestIntervene::test_what_is_kept",
    ),
    Mutant(
        "interventions with permutations of their own",
        "counterfactual/retrain.py",
        "_cut(permutation[mask[permutation]],",
        "_cut(permutation.roll(int(mask.sum()))[mask[permutation.roll(int(mask.sum()))]],",
        "test_interventions.py::TestIntervene::test_an_order_is_one_permutation_for_all",
    ),
    Mutant(
        "a change from the random drop",
        "counterfactual/interventions.py",
        'pl.col("variant") == "full"',
        'pl.col("variant") == "random"',
        "test_interventions.py::TestIntervene::test_changes_are_from_training_on_all_in_the_same_order",
    ),
    Mutant(
        "interventions of other settings taken for these",
        "cli/interventions.py",
        "is not None and content.items() <= before.items():",
        "is not None:",
        "test_interventions.py::TestCommand::test_rounds_that_are_there_are_not_done_again",
    ),
    Mutant(
        "one chance for all rounds",
        "cli/interventions.py",
        'SeedSequence([settings["seed"], number])',
        'SeedSequence([settings["seed"]])',
        "test_interventions.py::TestCommand::test_it_is_what_the_function_gives",
    ),
    Mutant(
        "top and bottom of a score swapped",
        "counterfactual/removals.py",
        '(("top", -1), ("bottom", 1))',
        '(("top", 1), ("bottom", -1))',
        "test_removals.py::test_the_lowest_left_out_raise_the_target_and_the_highest_lower_it",
    ),
    Mutant(
        "of equal scores any record left out",
        "counterfactual/removals.py",
        'np.argsort(sign * own, kind="stable")',
        'np.argsort(sign * own[::-1], kind="stable")[::-1]',
        "test_removals.py::test_of_equal_scores_the_record_that_comes_first_is_left_out",
    ),
    Mutant(
        "a removal's change from another order",
        "counterfactual/removals.py",
        "values[1:] - values[0] for name, values in own",
        "values[1:] - together[name][0] for name, values in own",
        "test_removals.py::test_curves_are_those_of_one_training_at_a_time",
    ),
    Mutant(
        "removals in one order over and over",
        "counterfactual/removals.py",
        "manual_seed(shuffle)",
        "manual_seed(shuffles[0])",
        "test_removals.py::test_curves_are_those_of_one_training_at_a_time",
    ),
    Mutant(
        "the spread of random removals over orders",
        "counterfactual/removals.py",
        "values.mean(axis=0) if side",
        "values.mean(axis=1) if side",
        "test_removals.py::test_curves_are_those_of_one_training_at_a_time",
    ),
    Mutant(
        "a share that removes no record",
        "counterfactual/removals.py",
        "if count < 1 or n - count < 2:",
        "if n - count < 2:",
        "test_removals.py::test_shares_that_cannot_be_left_out",
    ),
    Mutant(
        "curves of random scores beside random removals",
        "cli/rounds.py",
        'made.scores.items() if name != "random"}',
        "made.scores.items()}",
        "test_removals.py::test_the_command_adds_the_curves",
    ),
    Mutant(
        "policies measured with dropout",
        "counterfactual/outcomes.py",
        "with eval_mode(modules):",
        "with eval_mode([]):",
        "test_counterfactual.py::TestStudy::test_trained_policies_are_measured_without_dropout_and_with_the_same_chance",
    ),
    Mutant(
        "trainings that do not fit any more left out",
        "counterfactual/retrain.py",
        "range(0, len(weights), at_once)",
        "range(0, len(weights) - at_once + 1, at_once)",
        "test_counterfactual.py::TestMemory::test_small_budgets_give_the_same_parameters",
    ),
    Mutant(
        "every training at once whatever the memory",
        "counterfactual/retrain.py",
        "return min(count, 1 + (memory - results - one) // each)",
        "return count",
        "test_counterfactual.py::TestMemory::test_small_budgets_give_the_same_parameters",
    ),
    Mutant(
        "memory of a training without where it began",
        "counterfactual/retrain.py",
        "(max(held) + side_by_side * round.start.nbytes)",
        "max(held)",
        "test_counterfactual.py::TestMemory::test_what_is_held_is_what_was_estimated",
    ),
    Mutant(
        "minibatches as large as a rule left them",
        "counterfactual/retrain.py",
        "    return len(recording.records) if recording.update.batch_size is None else recording.update.batch_size",
        "    return max(map(len, recording.minibatches))",
        "test_counterfactual.py::test_minibatches_hold_what_was_asked_for_also_where_a_rule_kept_less",
    ),
    Mutant(
        "a segment of points one step too far",
        "rounds/schedule.py",
        "begin = (len(kept) - 1) * every",
        "begin = (len(kept) - 1) * every + (every > 2)",
        "test_rounds.py::TestMemory::test_points_made_again_change_nothing",
    ),
    Mutant(
        "the point after a segment forgotten",
        "rounds/schedule.py",
        "            after = before\n",
        "            after = before if segment else after\n",
        "test_rounds.py::TestMemory::test_points_made_again_change_nothing",
    ),
    Mutant(
        "points kept whatever the memory",
        "rounds/schedule.py",
        "        if fixed + point * own.points_held(count, every) <= memory:\n",
        "        if fixed <= memory:\n",
        "test_rounds.py::TestMemory::test_what_is_held_is_what_was_estimated",
    ),
    Mutant(
        "all points kept by the optimiser's scores",
        "rounds/schedule.py",
        "in enumerate(pairwise(point.map(Tensor.detach) for point in points(round))):",
        "in enumerate(list(pairwise(point.map(Tensor.detach) for point in points(round)))):",
        "test_rounds.py::TestMemory::test_going_forwards_holds_as_much_however_many_the_steps",
    ),
    Mutant(
        "Adam's momentum without its correction",
        "rounds/optimizers.py",
        'return 1 - torch.as_tensor(optimizer.settings["betas"][0] ** state["step"])',
        'return torch.ones_like(state["step"])',
        "test_rounds.py::TestScores::test_adams_momentum_is_what_its_updates_carry_of_a_gradient",
    ),
    Mutant(
        "a training of one record",
        "rounds/replay.py",
        "    if least < 2:\n",
        "    if least < 1:\n",
        "test_rounds.py::TestRefusals::test_weights_that_cannot_be",
    ),
    Mutant(
        "a target's fault blamed on the recording",
        "rounds/replay.py",
        'isinstance(wrong, WhenceError) or "NoneType" not in str(wrong) or not lacking',
        "not lacking",
        "test_rounds.py::TestTargets::test_a_fault_of_the_targets_own_is_shown_as_it_is",
    ),
    Mutant(
        "a study whose target is not looked at first",
        "counterfactual/study.py",
        "target = check_target(target, opened(policy, recording))",
        "pass",
        "test_counterfactual.py::TestStudy::test_it_is_refused_at_the_door",
    ),
    Mutant(
        "a fold that judges itself",
        "crossfitting.py",
        "(fold != number).nonzero()",
        "(fold == number).nonzero()",
        "test_rehearsal.py::test_each_fold_is_scored_by_the_others",
    ),
    Mutant(
        "episodes torn between folds",
        "crossfitting.py",
        "dealt: Tensor = episode % folds",
        "dealt: Tensor = torch.arange(len(episode)) % folds",
        "test_rehearsal.py::test_folds_keep_episodes_whole",
    ),
    Mutant(
        "a rehearsal that leaves the parameters moved",
        "sb3/rounds.py",
        "        load_tensors(tensors_of(policy), tensors)\n",
        "",
        "test_rehearsal.py::test_a_rehearsal_is_the_round_to_come_and_leaves_no_trace",
    ),
    Mutant(
        "a rehearsal that reads the schedules of the round before",
        "sb3/rehearsal.py",
        "            model._current_progress_remaining = self.remaining\n",
        "",
        "test_rehearsal.py::test_a_rehearsal_is_the_round_to_come_and_leaves_no_trace",
    ),
    Mutant(
        "a rehearsal that flattens the round's buffer",
        "sb3/rehearsal.py",
        "model.rollout_buffer = copy.copy(model.rollout_buffer)",
        "pass",
        "test_rehearsal.py::test_a_rehearsal_is_the_round_to_come_and_leaves_no_trace",
    ),
    Mutant(
        "the guard's verdict turned round",
        "sb3/callback.py",
        "selection if gain >= 0 else",
        "selection if gain <= 0 else",
        "test_rehearsal.py::test_the_guard_falls_back_where_selecting_does_harm",
    ),
    Mutant(
        "a guard that judges by what was trained on",
        "sb3/rehearsal.py",
        "mine, others = fold == half, records.take(fold != half)",
        "mine, others = fold == half, records.take(fold == half)",
        "test_rehearsal.py::test_the_gain_by_hand",
    ),
    Mutant(
        "advantages normalised over the buffer without Bessel's correction",
        "sb3/buffer.py",
        "raw.std(ddof=1)",
        "raw.std()",
        "test_rehearsal.py::test_normalised_over_the_buffer_by_hand",
    ),
    Mutant(
        "minibatches that normalise what is normalised",
        "sb3/buffer.py",
        "    model.normalize_advantage = False\n",
        "",
        "test_rehearsal.py::test_advantages_are_normalised_once_over_the_rollout",
    ),
    Mutant(
        "the soft edge on the wrong side",
        "rounds/smoothed.py",
        "torch.where(records.advantages > 0, above, below)",
        "torch.where(records.advantages < 0, above, below)",
        "test_smoothed.py::test_the_soft_edge_by_hand",
    ),
    Mutant(
        "the sum of trainings for their mean",
        "rounds/smoothed.py",
        "return found.mean(dim=1)",
        "return found.sum(dim=1)",
        "test_smoothed.py::test_the_derivative_of_each_training",
    ),
    Mutant(
        "a segment of trainings one step short",
        "rounds/smoothed.py",
        "min(begin + every, len(draws.steps)) - 1",
        "min(begin + every, len(draws.steps)) - 2",
        "test_smoothed.py::test_the_derivative_of_each_training",
    ),
    Mutant(
        "one order for all trainings",
        "rounds/smoothed.py",
        "torch.stack([torch.randperm(n, generator=generator) for _ in range(count)])",
        "torch.stack([torch.randperm(n, generator=generator)] * count)",
        "test_smoothed.py::test_what_is_drawn",
    ),
    Mutant(
        "parts of trainings that count alike",
        "rounds/smoothed.py",
        "* (len(part.weights) / draws)",
        "/ math.ceil(draws / at_once)",
        "test_smoothed.py::test_trainings_go_in_parts_where_memory_is_short",
    ),
    Mutant(
        "a sharp edge in the derivative",
        "rounds/smoothed.py",
        "one(soft, p, positions, w)",
        "one(round, p, positions, w)",
        "test_smoothed.py::test_it_sees_the_edge_that_the_derivative_does_not",
    ),
    Mutant(
        "a penalty that fits what it was fitted to",
        "counterfactual/linear.py",
        "np.mean((dual / diagonal) ** 2)",
        "np.mean((dual * penalty) ** 2)",
        "test_linear.py::test_the_penalty_leaves_one_out",
    ),
    Mutant(
        "a prior that is not taken off",
        "counterfactual/linear.py",
        "left = wanted - centred @ base",
        "left = wanted",
        "test_linear.py::test_a_prior_says_where_to_look",
    ),
    Mutant(
        "gradients of a rollout by the wrong half",
        "experiments/gradients.py",
        "advantages[half]) for half",
        "advantages[~half]) for half",
        "test_gradients.py::test_cosines_one_by_one",
    ),
    Mutant(
        "returns for advantages",
        "experiments/gradients.py",
        "torch.from_numpy(found - values)",
        "torch.from_numpy(found)",
        "test_gradients.py::test_returns_less_values_step_by_step",
    ),
    Mutant(
        "a verdict that ignores the steps",
        "llm/lab/problems.py",
        'response.split(";")[:-1] == expected[:-1]',
        'len(response.split(";")) == len(expected)',
        "test_llm_lab.py::test_verdicts_by_hand",
    ),
    Mutant(
        "a biased chance of k answers",
        "llm/lab/evaluation.py",
        "1.0 - math.comb(samples - correct, k) / math.comb(samples, k)",
        "1.0 - (1.0 - correct / samples) ** k",
        "test_llm_lab.py::test_pass_at_k_by_hand",
    ),
    Mutant(
        "splits that overlap",
        "llm/lab/arithmetic.py",
        "first += count",
        "first += count - 1",
        "test_llm_lab.py::test_splits_are_disjoint_and_the_seed_decides",
    ),
    Mutant(
        "problems in the imitation loss",
        "llm/lab/model.py",
        "labels[row, len(question) : len(whole)] = whole[len(question) :]",
        "labels[row, : len(whole)] = whole",
        "test_llm_lab.py::test_only_the_answer_and_its_end_have_labels",
    ),
    Mutant(
        "logits that say of the token they stand at",
        "llm/view.py",
        "found.logits[:, -width - 1 : -1]",
        "found.logits[:, -width:]",
        f"{LANGUAGE}::test_the_loop_is_plain_autograd_on_each_row_without_padding",
    ),
    Mutant(
        "positions that count padding",
        "llm/view.py",
        "(attended.long().cumsum(dim=1) - 1).clamp(min=0)",
        "torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)",
        f"{LANGUAGE}::test_padding_makes_no_difference",
    ),
    Mutant(
        "prompt tokens counted as tokens of the response",
        "llm/targets.py",
        'int(rows.observations["response_mask"].sum())',
        'int(rows.observations["attention_mask"].sum())',
        f"{LANGUAGE}::test_returns_by_hand",
    ),
    Mutant(
        "tokens of no response in a row's mean",
        "llm/objectives.py",
        'masked_mean(value, row["response_mask"])',
        "value.mean(dim=1)",
        f"{LANGUAGE}::test_token_ppo_by_hand",
    ),
    Mutant(
        "sum for mean over rows",
        "llm/targets.py",
        "return len(rows)",
        "return 1",
        f"{LANGUAGE}::test_returns_by_hand",
    ),
    Mutant(
        "recorded log-probs of tokens left out of the ratio",
        "llm/objectives.py",
        'surrogate(outputs.log_prob, row["log_probs"]',
        "surrogate(outputs.log_prob, outputs.log_prob.detach()",
        f"{LANGUAGE}::test_token_ppo_by_hand",
    ),
    Mutant(
        "RMSNorm's input taken as it comes",
        "llm/rules.py",
        '(g * _normalised(layer, x) * direction["weight"])',
        '(g * x * direction["weight"])',
        f"{LANGUAGE}::test_models_score_as_the_loop_does",
    ),
    Mutant(
        "batches of demonstrations that count alike",
        "llm/targets.py",
        "rows.to(outputs.log_prob.device)) / count",
        "rows.to(outputs.log_prob.device)) / max(self._count(rows), 1)",
        f"{LANGUAGE}::test_validation_is_the_loss_of_supervised_training",
    ),
    Mutant(
        "one backward pass for tokens that target and objective weigh apart",
        "engines/ghost.py",
        "<= _ROUNDING * size).all() else None",
        "<= 1e9).all() else None",
        f"{LANGUAGE}::test_one_backward_pass_serves_where_target_and_objective_weigh_a_rows_tokens_alike",
    ),
    Mutant(
        "a step over all rows that were drawn",
        "llm/steps.py",
        "kept = order[selection.keep[order]]",
        "kept = order",
        "test_llm_trainer.py::test_the_step_is_that_of_the_kept_rows_alone",
    ),
    Mutant(
        "parts of a step that each weigh alike",
        "llm/steps.py",
        "(weights[part].to(policy) * policy).sum() / total",
        "(weights[part].to(policy) * policy).sum() / weights[part].sum()",
        "test_llm_trainer.py::test_the_step_is_that_of_the_kept_rows_alone",
    ),
    Mutant(
        "the value loss divided by a part of the step",
        "llm/steps.py",
        "value.sum() / len(chosen))",
        "value.sum() / len(part))",
        "test_llm_trainer.py::test_the_step_is_that_of_the_kept_rows_alone",
    ),
    Mutant(
        "layers' inputs and gradients held until the pass is over",
        "engines/ghost.py",
        "rows.append(_products_on_arrival(tape, gradients, own))",
        "rows.append(_products(tape, gradients, own))",
        "test_llm_trainer.py::test_scoring_holds_no_more_than_a_training_step",
    ),
    Mutant(
        "a mean over the completions that were dropped",
        "llm/groups.py",
        "scale = len(selection.keep) / kept if kept and self._by_rows else float(kept > 0)",
        "scale = float(kept > 0)",
        "test_llm_groups.py::test_a_step_of_rloo_is_that_of_the_kept_alone",
    ),
    Mutant(
        "tokens of dropped completions in the denominator",
        "llm/groups.py",
        'output["num_items_in_batch"] = total.to(output["num_items_in_batch"])',
        "pass",
        "test_llm_groups.py::test_a_step_of_grpo_is_that_of_the_kept_alone",
    ),
    Mutant(
        "weights that change the size of a step",
        "llm/groups.py",
        "* (kept / max(float(selection.weights.sum()), 1e-30))",
        "",
        "test_llm_groups.py::test_a_step_of_rloo_is_that_of_the_kept_alone",
    ),
    Mutant(
        "a step by momentum alone",
        "llm/groups.py",
        "parameter.grad = None",
        "pass",
        "test_llm_groups.py::test_a_batch_that_was_dropped_takes_no_step",
    ),
    Mutant(
        "a divergence without its ratio",
        "llm/objectives.py",
        "ratio * divergence if self.corrected else divergence",
        "divergence",
        "test_llm_groups.py::test_the_objectives_gradient_is_that_of_trls_loss",
    ),
    Mutant(
        "a random control that drops fewer than influence does",
        "selection.py",
        'scores <= 0 if getattr(rule, "zeros", False) else scores < 0',
        "scores < 0",
        "test_llm_groups.py::test_equal_rewards_are_dropped_at_random_as_often_as_by_influence",
    ),
    Mutant(
        "responses drawn with a penalty that log-probs know nothing of",
        "llm/generation.py",
        "inner.generation_config = GenerationConfig()",
        "pass",
        "test_llm_trainer.py::test_a_models_own_settings_do_not_change_its_draws",
    ),
    Mutant(
        "a pass that misses layers below embeddings which require gradients",
        "engines/ghost.py",
        "for name in tape.plain), *others]",
        "for name in tape.plain)]",
        "test_llm_groups.py::test_scores_are_those_of_the_loop",
    ),
    Mutant(
        "scores under Accelerate's autocast",
        "llm/groups.py",
        "wrapped, model.forward = model.forward, plain",
        "wrapped = model.forward",
        "test_llm_groups.py::test_scores_are_in_the_models_own_precision_also_under_trls_default",
    ),
    Mutant(
        "a refused resume that has changed the model",
        "llm/trainer.py",
        "check_same(self._settings(), but=_MAY_CHANGE)\n            self._restore",
        "check_same(self._settings(), but=self._settings())\n            self._restore",
        "test_llm_trainer.py::test_a_training_that_was_broken_off_goes_on_as_if_not",
    ),
    Mutant(
        "a process that takes the mean over its own rows",
        "llm/targets.py",
        "return self.mean._total(outputs, records) / self.count",
        "return self.mean._total(outputs, records) / max(self.mean._count(records), 1)",
        f"{PROCESSES}::test_two_processes_train_as_one",
    ),
    Mutant(
        "steps on the gradient of one process's rows",
        "llm/processes.py",
        "parameter.grad = total[at]",
        "pass",
        f"{PROCESSES}::test_two_processes_train_as_one",
    ),
    Mutant(
        "a user's target counted once by every process",
        "llm/targets.py",
        "self.target(view, params, self.rows) / self.number",
        "self.target(view, params, self.rows)",
        f"{PROCESSES}::test_two_processes_train_as_one",
    ),
    Mutant(
        "rows of processes gathered in another order",
        "llm/processes.py",
        "parts = self.accelerator.gather(sent.contiguous()).split(most)",
        "parts = self.accelerator.gather(sent.contiguous()).split(most)[::-1]",
        f"{PROCESSES}::test_two_processes_train_as_one",
    ),
    Mutant(
        "demonstrations without an end",
        "llm/demonstrations.py",
        "[*response, tokenizer.eos_token_id]",
        "response",
        "test_llm_demonstrations.py::test_the_target_is_minus_the_loss_of_supervised_training",
    ),
    Mutant(
        "held-out responses from training's own generator",
        "llm/trainer.py",
        '_timed(seconds, "held_out"), kept_generators(),',
        '_timed(seconds, "held_out"),',
        "test_llm_trainer.py::test_held_out_prompts_are_answered_anew_in_every_round",
    ),
    Mutant(
        "a slip that the next step forgets",
        "llm/lab/problems.py",
        '        value = result\n    return ";".join([*parts, str(value)])\n\n\ndef answer',
        '        value = result - slips\n    return ";".join([*parts, str(value)])\n\n\ndef answer',
        "test_llm_lab.py::test_a_habit_by_hand",
    ),
    Mutant(
        "a random control charged for scoring",
        "experiments/language.py",
        'if config.arm.startswith("random"):',
        "if False:",
        "test_language.py::TestRun::test_a_control_is_not_charged_for_scoring",
    ),
    Mutant(
        "a round told twice after a run was broken off",
        "runs.py",
        'table.filter(pl.col("round") <= rounds)',
        "table",
        "test_runs.py::test_resume_forgets_what_came_later",
    ),
    Mutant(
        "rewards that are not less the divergence",
        "llm/losses.py",
        "torch.where(mask, -penalty, 0.0)",
        "torch.where(mask, penalty, 0.0)",
        "test_llm_losses.py::test_the_reward_is_at_the_last_token",
    ),
    Mutant(
        "advantages that run on into the padding",
        "llm/losses.py",
        "later = torch.where(mask[:, at], delta + gamma * lam * later, 0.0)",
        "later = delta + gamma * lam * later",
        "test_llm_losses.py::test_advantages_by_hand",
    ),
    Mutant(
        "a value loss that takes the smaller error",
        "llm/losses.py",
        "error = torch.maximum(error,",
        "error = torch.minimum(error,",
        "test_llm_losses.py::test_the_clipped_value_loss",
    ),
    Mutant(
        "a response that ends before its end",
        "llm/generation.py",
        "before == 0",
        "before + is_end == 0",
        "test_llm_losses.py::test_a_response_ends_with_its_first_end",
    ),
    Mutant(
        "a divergence steered the wrong way",
        "llm/losses.py",
        "1 + error * rows",
        "1 - error * rows",
        "test_llm_losses.py::test_the_divergences_weight_is_steered",
    ),
    Mutant(
        "a training that goes on with other orders",
        "llm/trainer.py",
        'self._generator.set_state(generators.pop("own"))',
        'generators.pop("own")',
        "test_llm_trainer.py::test_a_training_that_was_broken_off_goes_on_as_if_not",
    ),
    Mutant(
        "the reference with its adapter on",
        "llm/model.py",
        "off = model.language_model.disable_adapter() if self._copy is None else nullcontext()",
        "off = nullcontext()",
        "test_llm_trainer.py::test_with_an_adapter_the_reference_is_the_model_without_it",
    ),
    Mutant(
        "weights over the mean of all scores",
        "selection.py",
        "scores / scores[kept.keep].mean()",
        "scores / scores.mean()",
        "test_selection.py::test_ippo_weighs_what_is_positive_by_its_score",
    ),
    Mutant(
        "columns of other prompts",
        "llm/prompts.py",
        "[column[at] for at in chosen]",
        "list(column[: len(chosen)])",
        "test_llm_trainer.py::test_rewards_get_the_columns_of_their_prompts",
    ),
    Mutant(
        "columns of another process's prompts",
        "llm/rollout.py",
        "{name: column[own] for",
        "{name: column[: len(responses.texts[own])] for",
        f"{PROCESSES}::test_two_processes_train_as_one",
    ),
    Mutant(
        "tied weights that are told of twice",
        "llm/footprint.py",
        "made.setdefault(id(tensor), _like(tensor))",
        "_like(tensor)",
        "test_llm_footprint.py::test_the_model_is_left_as_it_was_made",
    ),
    Mutant(
        "keys and values of prompts alone",
        "llm/footprint.py",
        "max(held) + round(grown)",
        "max(held)",
        "test_llm_footprint.py::test_a_pass_holds_what_it_was_said_to",
    ),
    Mutant(
        "a rehearsal that scores in one go",
        "experiments/estimate.py",
        "passes = 1 if at_once or target is not None else 2",
        "passes = 1",
        "test_language.py::TestCommand::test_a_reward_of_ones_own",
    ),
    Mutant(
        "a changed reward that is taken for the old one",
        "experiments/language.py",
        "hashlib.sha256(Path(file).read_bytes()).hexdigest()",
        "file",
        "test_language.py::TestCommand::test_a_reward_that_has_changed_is_another_run",
    ),
    Mutant(
        "a rehearsal that forgets the target's gradient",
        "experiments/estimate.py",
        "(whole if at_once else part.held) + gradients",
        "(whole if at_once else part.held)",
        "test_language.py::TestCommand::test_a_reward_of_ones_own",
    ),
    Mutant(
        "a loss type of TRL's that is not known",
        "llm/groups.py",
        '_TOKENS = ("dapo", "cispo", "vespo", "bnpo")',
        '_TOKENS = ("dapo", "cispo", "bnpo")',
        "test_llm_contract.py::test_every_loss_type_is_known",
    ),
    Mutant(
        "columns that TRL takes for its own",
        "experiments/groups.py",
        '_COLUMN = "of_data_set_"',
        '_COLUMN = ""',
        "test_language.py::TestCommand::test_a_reward_of_ones_own",
    ),
    Mutant(
        "a shorter chunk's prompts padded on the right",
        "llm/generation.py",
        "(width - longest, missing)",
        "(0, width - longest + missing)",
        "test_llm_trainer.py::test_prompts_of_a_shorter_chunk_end_where_others_do",
    ),
)


def run(sources: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run a test on the sources in a directory."""
    path, *rest = test.split(" ", 1)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"tests/{path}"]
    environment = {**os.environ, "PYTHONPATH": str(sources / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    found = rest[0].split() if rest else []
    return subprocess.run([*command, *found], cwd=sources, env=environment, capture_output=True, text=True, check=False)


def copied(directory: Path) -> Path:
    """Copy what the tests need, so that neither the mutant nor pytest touches the tree."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, directory / name)
    return directory


def verdict(mutant: Mutant) -> str | None:
    """Return what is wrong with a mutant, or None where its test caught it."""
    with tempfile.TemporaryDirectory() as temporary:
        sources = copied(Path(temporary))
        file = sources / "src" / "whence" / mutant.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.old) < 1:
            return f"{mutant.file} no longer holds {mutant.old!r}"
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        outcome = run(sources, mutant.test)
    if outcome.returncode == 0:
        return f"{mutant.test} does not notice"
    if outcome.returncode != 1 or "\nFAILED tests" not in outcome.stdout:
        return f"{mutant.test} did not run: {outcome.stdout[-400:]}{outcome.stderr[-400:]}"
    return None


def main(chosen: Sequence[str]) -> int:
    """Try the mutants whose name holds one of the words; return the number that were not caught."""
    mutants = [m for m in MUTANTS if not chosen or any(word in m.name for word in chosen)]
    with tempfile.TemporaryDirectory() as temporary:
        sources = copied(Path(temporary))
        for test in track(sorted({m.test for m in mutants}), "tests without a fault"):
            if (outcome := run(sources, test)).returncode:
                print(f"{test} fails without a fault:\n{outcome.stdout[-2000:]}{outcome.stderr[-1000:]}")
                return 1
    survivors = 0
    for mutant in track(mutants, "mutants"):
        if problem := verdict(mutant):
            survivors += 1
            print(f"SURVIVED {mutant.name}: {problem}")
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants caught")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))

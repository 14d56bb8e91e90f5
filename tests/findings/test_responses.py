"""Findings on a language model's groups, responses, evaluations and sampler, each planted, and none in sound runs."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from whence.findings import find, inspect
from whence.findings.response_figures import choose_rounds, measure_repetition, measure_rounds
from whence.findings.settings import RESPONSES, give_advice
from whence.findings.trainer_options import OPTIONS, name_trainer
from whence.runs import RunDirectory
from whence.stored import read_logs

ROUNDS, GROUPS, SIZE = 16, 4, 6
Columns = dict[str, Any]
Plant = Callable[[int, Columns, Columns], None]


def make_round(generator: np.random.Generator, number: int, chance: float) -> Columns:
    """A round of a sound run: rewards differ within most groups, texts do not repeat, the sampler is the policy."""
    size = GROUPS * SIZE
    log_probs = -generator.exponential(size=(size, 40))
    return {
        "record_id": np.arange(size) + number * size,
        "group_id": np.repeat(np.arange(GROUPS), SIZE),
        "prompt": np.repeat([f"{number}, {group}" for group in range(GROUPS)], SIZE),
        "response": ["..."] * size,
        "reward": (generator.random(size) < chance).astype(float),
        "response_ids": generator.integers(50, size=(size, 40)).tolist(),
        "token_log_probs": log_probs.tolist(),
        "token_sampler_log_probs": (log_probs + 0.03 * generator.normal(size=(size, 40))).tolist(),
    }


def make_run(path: Path, plant: Plant = lambda number, columns, row: None, **config: Any) -> RunDirectory:
    """A run of which `plant` changes each round's records, and its row of metrics."""
    generator = np.random.default_rng(0)
    run = RunDirectory.create(path / "run", {"kind": "language", "algorithm": "grpo", **config})
    for number in range(1, ROUNDS + 1):
        chance, noise = 0.3 + 0.02 * number, generator.normal(size=3)
        columns = make_round(generator, number, chance)
        row = {"length": 40 + noise[0], "ended_share": 0.9, "train/entropy_loss": -0.8 + 0.03 * noise[1], "kl": 1.0}
        row |= {"test_return": chance + 0.02 * noise[2]}
        plant(number, columns, row)
        run.append("evaluations", {"round": number, "test_return": row.pop("test_return"), "standard_error": 0.02})
        run.write_round("records", number, pl.DataFrame(columns))
        run.append("metrics", {"round": number, "reward": pl.Series(columns["reward"]).mean(), **row})
    return run


def test_a_sound_run_has_no_line_and_all_is_looked_at(tmp_path: Path) -> None:
    checks = inspect(make_run(tmp_path))
    assert [check.name for check in checks if check.finding is not None] == []
    unknown = {check.name for check in checks if check.outcome == "could not be looked at"}
    assert unknown == {"rewards that rise while another falls", "dropped responses"}


def set_rewards(columns: Columns, reward: float) -> None:
    columns["reward"] = np.full(GROUPS * SIZE, reward)


def plant_wrong(number: int, columns: Columns, row: Columns) -> None:
    set_rewards(columns, 0.0)


def plant_solved(number: int, columns: Columns, row: Columns) -> None:
    if number > 8:
        set_rewards(columns, 1.0)


def plant_shuffled_ids(number: int, columns: Columns, row: Columns) -> None:
    if number == 5:
        columns["group_id"] = np.tile(np.arange(GROUPS), SIZE)


def plant_loops(number: int, columns: Columns, row: Columns) -> None:
    if number > 9:
        columns["response_ids"][::2] = [[1, 2, 3, 4, 5] * 8] * (GROUPS * SIZE // 2)


def plant_sampler(number: int, columns: Columns, row: Columns) -> None:
    columns["token_sampler_log_probs"] = (1.8 * np.array(columns["token_log_probs"])).tolist()


def plant_cut(number: int, columns: Columns, row: Columns) -> None:
    row["ended_share"] = 0.2


def plant_length(number: int, columns: Columns, row: Columns) -> None:
    row["length"] += 10 * number
    set_rewards(columns, float(number % 2))


def plant_short(number: int, columns: Columns, row: Columns) -> None:
    row["length"] -= 2 * number
    set_rewards(columns, float(number % 2))


def plant_entropy(number: int, columns: Columns, row: Columns) -> None:
    row["train/entropy_loss"] *= 1 + number / 2


def plant_evaluation(number: int, columns: Columns, row: Columns) -> None:
    row["test_return"] += 0.1 * min(number, 6) - 0.06 * max(0, number - 6)  # it ends above its beginning


PLANTS: list[tuple[Plant, str, str, str]] = [
    (plant_wrong, "groups without signal", "wrong", "since round 13, 100% had in the first rounds"),
    (plant_solved, "groups without signal", "unusual", "100% of the groups have equal rewards since round 13"),
    (plant_shuffled_ids, "prompts of a group", "wrong", "4 groups of round 5 hold responses to several prompts"),
    (plant_loops, "repeated text", "unusual", "50% of the long responses repeat themselves, 0% did"),
    (plant_sampler, "sampler and trainer", "wrong", "are 0.8 nats a token off"),
    (plant_cut, "responses cut from the start", "unusual", "Only 20% of the responses end before the limit"),
    (plant_length, "length of responses", "unusual", "from 65 to 185 tokens, and the reward does not rise"),
    (plant_short, "length of responses", "unusual", "from 35 to 11 tokens, and the reward does not rise"),
    (plant_entropy, "entropy that rises", "unusual", "The entropy of the model's tokens rises from 1.78 to 6.37"),
    (plant_evaluation, "evaluations", "unusual", "while the training reward rises"),
]


@pytest.mark.parametrize(("plant", "name", "outcome", "title"), PLANTS)
def test_what_is_planted_is_named(plant: Plant, name: str, outcome: str, title: str, tmp_path: Path) -> None:
    (check,) = (
        check for check in inspect(make_run(tmp_path, plant)) if check.finding is not None and check.name == name
    )
    assert (check.outcome, title in check.text) == (outcome, True), check.text
    assert "missing_eos_penalty" not in check.finding.advice  # type: ignore[union-attr]


def plant_steps_to_the_answer(number: int, columns: Columns, row: Columns) -> None:
    row["length"] += 10 * number  # while the reward rises


def plant_noise(number: int, columns: Columns, row: Columns) -> None:
    row["test_return"] = 0.5 - 0.0045 * number  # by more than a tenth, and less than three standard errors


@pytest.mark.parametrize("plant", [plant_steps_to_the_answer, plant_noise])
def test_what_may_be_sound_has_no_line(plant: Plant, tmp_path: Path) -> None:
    assert find(make_run(tmp_path, plant)) == []


def test_groups_are_named_by_what_their_rewards_are(tmp_path: Path) -> None:
    (finding,) = (one for one in find(make_run(tmp_path, plant_solved)) if "groups" in one.title)
    assert "100% of the groups are all at the highest reward of the run, 0% all at the lowest." in finding.evidence
    assert "a larger `num_generations`" in finding.advice


def test_records_show_what_was_planted(tmp_path: Path) -> None:
    (finding,) = find(make_run(tmp_path / "mixed", plant_shuffled_ids))
    assert (finding.round, sorted(finding.record_ids)) == (5, [*range(120, 144)])
    (finding,) = find(make_run(tmp_path / "loops", plant_loops))
    assert (finding.round, finding.record_ids) == (16, tuple(range(16 * 24, 17 * 24, 2)))


def test_rounds_may_lack_columns_and_values(tmp_path: Path) -> None:
    def plant(number: int, columns: Columns, row: Columns) -> None:
        plant_shuffled_ids(number, columns, row)
        if number == 2:
            del columns["group_id"], columns["token_sampler_log_probs"]
        if number == 3:
            columns["response_ids"][:3], columns["reward"] = [None] * 3, [None, *columns["reward"][1:]]
            columns["token_log_probs"] = [None, *columns["token_log_probs"][1:]]

    assert [finding.round for finding in find(make_run(tmp_path, plant))] == [5]


def test_rollouts_of_one_checkpoint_are_compared_where_they_fit_best(tmp_path: Path) -> None:
    def plant(number: int, columns: Columns, row: Columns) -> None:
        if number != 7:
            plant_sampler(number, columns, row)

    assert find(make_run(tmp_path / "trained", plant))
    assert find(make_run(tmp_path / "scored", plant, algorithm="scored")) == []
    (finding,) = find(make_run(tmp_path / "another", plant_sampler, algorithm="scored"))
    assert finding.rank == "unusual"  # the checkpoint may be of none of these rounds


def test_a_group_that_the_user_names_may_hold_several_prompts(tmp_path: Path) -> None:
    assert find(make_run(tmp_path, plant_shuffled_ids, columns={"group": "task"})) == []


def test_the_first_rounds_are_read_without_a_gap() -> None:
    assert choose_rounds([3, 4, 5]) == [3, 4, 5]
    chosen = choose_rounds([*range(1, 1001)])
    assert chosen[:8] == [*range(1, 9)]
    assert (chosen[-1], len(chosen) <= 64) == (1000, True)


def test_repetition_is_of_sequences_of_four_tokens() -> None:
    assert measure_repetition([*range(40)]) == 0.0
    assert measure_repetition([7] * 40) == pytest.approx(36 / 37)
    assert measure_repetition([7] * 31) is None


def test_options_are_those_of_the_trainers() -> None:
    from trl import GRPOConfig, RLOOConfig

    from whence.llm import PPOConfig

    configs: dict[str, Any] = {"ppo": PPOConfig, "grpo": GRPOConfig, "rloo": RLOOConfig}
    for trainer, config in configs.items():
        names = {field.name for field in dataclasses.fields(config)}
        options = {name for text in OPTIONS[trainer] for name in re.findall(r"`(\w+)`", text)}
        assert options <= names, trainer
        assert len(options) >= 5
    described: list[dict[str, Any]] = [{"algorithm": "rloo"}, {"ppo": {}}, {}]
    assert [*map(name_trainer, described)] == ["rloo", "ppo", ""]


@pytest.mark.parametrize("trainer", [*OPTIONS, ""])
def test_advice_is_in_the_trainers_words(trainer: str) -> None:
    table = pl.DataFrame({"round": [1, 2], "ended_share": [0.9, 0.0], "kl": [0.0, 99.0], "length": [20.0, 20.0]})
    findings = give_advice(table, trainer)
    assert ("`missing_eos_penalty`" in findings["ends of responses"].advice) == (trainer == "ppo")
    assert ("`mask_truncated_completions`" in findings["ends of responses"].advice) == (
        trainer in ("grpo", "rloo", "TRL")
    )
    names = {"verl": "kl_loss_coef`", "OpenRLHF": "`--init_kl_coef`", "ppo": "`init_kl_coef`", "": "`init_kl_coef`"}
    assert names.get(trainer, "`beta`") in findings["divergence from the start model"].advice


def log_steps(path: Path, rows: list[Columns]) -> Path:
    lines = (json.dumps({"step": step, **row}) for step, row in enumerate(rows, 1))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


TRL = {"reward": 0.5, "completions/mean_length": 50.0, "completions/clipped_ratio": 0.1, "frac_reward_zero_std": 0.4}
VERL = {"critic/score/mean": 0.5, "response_length/mean": 50.0, "actor/entropy": 0.5}
OPENRLHF = {"reward": 0.5, "response_length": 50.0}
GAP = "sampling/sampling_logp_difference/mean"


@pytest.mark.parametrize(
    ("row", "trainer", "planted", "name"),
    [
        (TRL | {GAP: 0.02}, "TRL", {"frac_reward_zero_std": 1.0}, "groups without signal"),
        (TRL | {GAP: 0.02}, "TRL", {GAP: 0.7}, "sampler and trainer"),
        (TRL, "TRL", {"completions/clipped_ratio": 0.8}, "responses cut from the start"),
        (VERL | {"rollout_corr/kl": 0.001}, "verl", {"rollout_corr/kl": 0.8}, "sampler and trainer"),
        (OPENRLHF, "OpenRLHF", {}, ""),
    ],
)
def test_logs_of_other_libraries(row: Columns, trainer: str, planted: Columns, name: str, tmp_path: Path) -> None:
    path = log_steps(tmp_path / "log.jsonl", [row] * 16)
    assert read_logs(path).trainer == trainer
    assert find(path) == []
    if planted:
        (check,) = (each for each in inspect(log_steps(path, [row | planted] * 16)) if each.finding is not None)
        assert (check.name, check.outcome) == (name, "unusual" if "clipped" in str(planted) else "wrong")


@pytest.mark.parametrize(("row", "evaluation"), [(TRL, "eval_reward"), (VERL, "val-core/gsm8k/acc/mean@1")])
def test_evaluations_that_are_logged_apart(row: Columns, evaluation: str, tmp_path: Path) -> None:
    reward = next(name for name in row if name in ("reward", "critic/score/mean"))

    def log(fall: float) -> list[str]:
        rows = [row | {reward: 0.3 + 0.02 * step} for step in range(16)]
        tests = [{"step": step, evaluation: 0.5 - fall * step} for step in range(1, 17)]
        path = log_steps(tmp_path / "log.jsonl", [each for pair in zip(rows, tests, strict=True) for each in pair])
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [line | {"step": place // 2 + 1} for place, line in enumerate(lines)]
        path.write_text("\n".join(map(json.dumps, steps)), encoding="utf-8")
        return [finding.title for finding in find(path)]

    assert log(-0.01) == []
    (title,) = log(0.02)
    assert re.match(r"The evaluation falls from 0\.4\d to 0\.2\d*, while the training reward rises", title)


def test_every_rule_has_a_test() -> None:
    planted = {name for _, name, _, _ in PLANTS}
    assert {*RESPONSES} - planted == {
        *("divergence from the start model", "entropy of the tokens", "ends of responses", "dropped responses")
    }


def test_figures_of_a_run_without_records(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"kind": "language"})
    assert len(measure_rounds(run)) == 0
    assert find(run) == []

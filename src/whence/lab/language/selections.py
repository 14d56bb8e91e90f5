"""What the arm of a language model's run selects and scores by, and the settings that it refuses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whence.core import WhenceError, suggest
from whence.lab.arms import ANY, GROUPS, LANGUAGE_ARMS, LANGUAGE_TARGETS, Arm, find_arm, split_arm
from whence.selection import SelectionRule
from whence.stored.language import LanguageConfig


def read_arm(name: str) -> tuple[Arm, str | None]:
    """Return an arm and the target of its scores; None: nothing is scored, or the rule brings its own."""
    selection, target = split_arm(name)
    arm = find_arm(selection, LANGUAGE_ARMS)
    return arm, target or arm.target


def make_rule(config: LanguageConfig) -> SelectionRule:
    """Return the selection rule of a run's arm."""
    half = max(2, config.responses_per_prompt // 2)
    return read_arm(config.arm)[0].make_rule(seed=config.seed, unit=config.unit, keep=half)


def check_arm(config: LanguageConfig) -> None:
    """Refuse, with a `WhenceError`, an arm that is not known, and settings that it does not go with."""
    selection, named_target = split_arm(config.arm)
    arm, target = read_arm(config.arm)
    if named_target is not None and named_target not in LANGUAGE_TARGETS:
        raise WhenceError(f"The target {named_target!r} is unknown.{suggest(named_target, LANGUAGE_TARGETS)}")
    in_groups = GROUPS in arm.needs or "group" in (config.unit, arm.unit)
    refusals = [
        (config.unit and arm.unit != ANY, f"unit has no effect: {selection} selects by {arm.unit or 'nothing'}."),
        (
            in_groups and config.responses_per_prompt < 2,
            f"The arm {config.arm} needs several responses to a prompt: --settings '{{\"num_generations\": 8}}'.",
        ),
        (named_target and not arm.target, f"The target {named_target!r} has no effect: {selection} reads none."),
        (
            not config.task and target == "validation" and not config.demonstrations,
            f"The arm {config.arm} scores by trusted demonstrations; give a data set of them (--demonstrations).",
        ),
        (
            config.held_out and target in (None, "validation"),
            f"held_out has no effect: the target of the arm {config.arm} reads no responses to held-out prompts.",
        ),
    ]
    if reason := next((reason for is_wrong, reason in refusals if is_wrong), None):
        raise WhenceError(reason)


def plan_language_comparison(arms: Sequence[str], seeds: int, **fields: Any) -> list[LanguageConfig]:
    """Return the runs of a comparison, arm by arm within each seed; fields that an arm does not read it does not get.

    `fields` are the other fields of `LanguageConfig`. An arm or a setting that is refused, and arms that nothing
    measures, raise a `WhenceError`.
    """
    configs = []
    for name in arms:
        arm, target = read_arm(name)
        unread = [] if arm.unit == ANY else ["unit"]
        unread += [] if target is not None else ["held_out", "select"]
        configs.append(LanguageConfig(name, 0, **{key: fields[key] for key in fields if key not in unread}))
        check_arm(configs[-1])
    if configs[0].task is None and configs[0].test_dataset is None:
        raise WhenceError("Arms are compared by a test; give its prompts: --test-dataset.")
    return [replace(config, seed=seed) for seed in range(seeds) for config in configs]


def configure_trainer(config: LanguageConfig, output_dir: str = "runs/checked") -> Any:
    """Return the trainer's configuration, as `make_trainer_config` does, of a run whose arm can select under it.

    Raises:
        WhenceError: a setting is unknown, out of its range, or one that the arm does not go with.
        Unsupported: the arm cannot select under one of TRL's settings; see `check_selectable`.
    """
    check_arm(config)
    from whence.stored.language import make_trainer_config  # needs Transformers, which a comparison of agents lacks

    trainer_config = make_trainer_config(config, output_dir)
    if config.algorithm != "ppo" and read_arm(config.arm)[0].unit:
        from whence.llm.trl.completions import check_selectable  # TRL takes seconds to import

        check_selectable(trainer_config)
    return trainer_config

"""What was looked at in a run: outcomes, the findings among them, and both in the terminal and on the page."""

import json
import shlex
import shutil
from typing import Any

import numpy as np
import polars as pl
import pytest
from rich.console import Console
from threadpoolctl import threadpool_info, threadpool_limits

from whence.findings import choose_findings, count_outcomes, find, inspect, say_nothing_stands_out
from whence.findings.detectors import Detector
from whence.findings.finding import CannotTellError, Check, Finding, Sight
from whence.findings.reference import compare
from whence.page import ExploredRun
from whence.runs import RunDirectory

LONG = "A" * 250
TOPS = {"pace": 2.0, "copies": 1.0, "ends": 0.0, "entropy": 1.0, f"luck{LONG}": 0.0}
HEALTHY = {name: [largest, *[largest / 2] * 19] for name, largest in TOPS.items()}
RANKS = ("unusual", "wrong")
HOSTILE = "[red]x[/] \x1b[31m<img src=x>"


def see(statistic: float, p: float | None = None, **rules: Any) -> Detector:
    def look(evidence: Any) -> Sight:
        return Sight(statistic, "reward", f"Rewards of {HOSTILE}", "Seen.", "Look.", evidence.actions > 0, p)

    return Detector(look, **{"least": 0.0, **rules})


def see_nothing(reason: str) -> Detector:
    def look(evidence: Any) -> Sight:
        raise CannotTellError(reason)

    return Detector(look, 0.0)


def make_agent(path: Any, **changes: Any) -> RunDirectory:
    run, ids = RunDirectory.create(path / "run", {"action_space": {"type": "Discrete", "n": 2}}), np.arange(8)
    table = {"record_id": ids, "env_index": 0 * ids, "episode_id": ids // 4, "step": ids % 4, "action": ids % 2}
    run.write_round("records", 1, pl.DataFrame(table | {"reward": 1.0 * ids} | changes))
    return run


@pytest.fixture
def agent(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    looks = {
        "news": see(9.0),
        "images": see_nothing(f"it has none of {HOSTILE}"),
        "pixels": see_nothing(f"it has none of {HOSTILE}"),
        "pace": see(2.4),
        "copies": see(1.6, p=0.001),
        "entropy": see(0.0),
        "ends": see(0.1),
        f"luck{LONG}": see(9.0, p=0.02),
    }
    monkeypatch.setattr("whence.findings.inspection.DETECTORS", looks)
    monkeypatch.setattr("whence.findings.inspection.read_reference", lambda: HEALTHY)
    return make_agent(tmp_path)


def test_outcomes_say_how_a_figure_compares_with_healthy_environments(agent: RunDirectory) -> None:
    checks = {check.name: (check.outcome, check.text) for check in inspect(agent)}
    reason = f"because it has none of {HOSTILE}"
    assert [*checks.items()] == [
        ("copies", ("wrong", "larger than in any run of 20 healthy environments, 1.6 times the largest")),
        ("ends", ("wrong", "seen in no run of 20 healthy environments")),
        ("pace", ("unusual", "larger than in any run of 20 healthy environments")),
        ("entropy", ("fine", "nothing is seen")),
        (
            f"luck{LONG}",
            (
                "fine",
                "seen in no run of 20 healthy environments, but by chance in 2.0% of such runs",
            ),
        ),
        ("news", ("could not be looked at", "because no healthy run was measured")),
        ("images", ("could not be looked at", reason)),
        ("pixels", ("could not be looked at", reason)),
    ]
    assert count_outcomes(inspect(agent)) == "2 wrong, 1 unusual, 2 fine, 3 could not be looked at"


@pytest.mark.parametrize(
    ("statistic", "rules", "outcome", "text"),
    [
        (3.5, {}, "wrong", "larger than in any run of 20 healthy environments, 1.75 times the largest"),
        (2.5, {}, "unusual", "larger than in any run of 20 healthy environments"),
        (1.5, {}, "fine", "as large in 1 of 20 healthy environments"),
        (3.5, {"least": 4.0}, "fine", "too little to matter"),
        (3.5, {"most": "unusual"}, "unusual", "larger than in any run of 20 healthy environments"),
        (0.1, {"most": "unusual", "is_fact": True}, "unusual", "true by itself"),
    ],
)
def test_a_detector_says_what_matters_and_what_is_at_most_unusual(
    statistic: float, rules: dict[str, Any], outcome: str, text: str
) -> None:
    assert compare(statistic, HEALTHY["pace"], see(0.0, **rules)) == (outcome, text)


@pytest.mark.parametrize(("count", "outcome"), [(20, "wrong"), (19, "unusual"), (0, "could not be looked at")])
def test_few_healthy_environments_are_no_ground_for_wrong(count: int, outcome: str) -> None:
    for healthy in ([1.0] * count, [0.0] * count):
        assert compare(9.0, healthy, see(0.0))[0] == outcome
    assert compare(9.0, [], see(0.0, most="unusual", is_fact=True))[0] == "unusual"


def test_findings_are_those_of_the_checks_and_have_their_ranks(agent: RunDirectory) -> None:
    first, *others = find(agent)
    assert [first.rank, *(one.rank for one in others)] == ["wrong", "wrong", "unusual"]
    assert [first, *others] == [check.finding for check in inspect(agent)[:3]]
    # The chance is said only where there is a test.
    beyond = "Seen. It is larger than in any run of 20 healthy environments, 1.6 times the largest."
    assert first.evidence == f"{beyond} The chance of this where nothing is wrong is 0.001."
    assert others[1].evidence == "Seen. It is larger than in any run of 20 healthy environments."
    assert (first.p, others[1].p) == (0.001, None)
    assert (first.round, first.record_ids) == (1, (1, 3, 5, 7))
    assert {one.next_command for one in find(agent)} == {f"whence show {agent.path} --record 1"}
    assert len(choose_findings([check for check in inspect(agent) for _ in range(3)])) == 5


def test_a_run_without_actions_says_why_nothing_was_looked_at(tmp_path: Any) -> None:
    run = RunDirectory.create(tmp_path / "run", {})
    run.write_round("records", 1, pl.DataFrame({"record_id": [0, 1], "score": [0.1, 0.2]}))
    checks = inspect(run)
    assert {check.outcome for check in checks} == {"could not be looked at"}
    assert "no round holds actions and rewards" in checks[0].text
    assert say_nothing_stands_out(checks) == "Nothing could be looked at."


def test_silence_says_what_it_is_worth(agent: RunDirectory) -> None:
    fine = [
        Check("pace", "fine", ""),
        Check("copies", "fine", ""),
        Check("images", "could not be looked at", "because"),
    ]
    compared = "2 figures were looked at, compared with those of 20 healthy environments"
    assert say_nothing_stands_out(fine) == f"Nothing stands out: {compared}. That is no proof that all is well."
    # Rules on a language model's run are compared with none.
    assert "one figure" in say_nothing_stands_out([Check("ends of responses", "fine", "")])
    assert "environments" not in say_nothing_stands_out([Check("ends of responses", "fine", "")])


def make_language(path: Any, rounds: int, **columns: list[Any]) -> RunDirectory:
    run = RunDirectory.create(path / "run", {"kind": "language"})
    for number in range(1, rounds + 1):
        rows = {"record_id": [*range(16)], "prompt": [*"ab"] * 8, "reward.right": [0.5] * 16, "reward.long": [0.5] * 16}
        run.write_round("records", number, pl.DataFrame(rows))
        run.append("metrics", {"round": number, **{name: values[number - 1] for name, values in columns.items()}})
    return run


def test_rules_of_a_language_model_are_fine_wrong_or_unknown(tmp_path: Any) -> None:
    run = make_language(
        tmp_path, 3, kl=[0.0, 9.0, 99.0], length=[9.0] * 3, ended_share=[0.9] * 3, dropped_share=[None] * 3
    )
    checks = inspect(run)
    seen = {check.name: check for check in checks}
    outcomes = {name: check.outcome for name, check in seen.items()}
    assert [name for name, outcome in outcomes.items() if outcome == "wrong"] == ["divergence from the start model"]
    assert [name for name, outcome in outcomes.items() if outcome == "fine"] == ["ends of responses"]
    assert len(seen) == 13
    reasons = {
        "ends of responses": "nothing is seen in 3 rounds",
        "rewards that rise while another falls": "because fewer than 8 rounds are stored",
        "entropy of the tokens": "because the run has no `train/entropy_loss`",
        "length of responses": "because fewer than 8 rounds have it",
    }
    assert {name: seen[name].text for name in reasons} == reasons
    assert find(run) == [checks[0].finding]
    assert find(run)[0].rank == "wrong"
    assert find(run)[0].next_command == f"whence view {run.path}"


def test_rewards_of_enough_rounds_are_looked_at(tmp_path: Any) -> None:
    rewards = {check.name: check for check in inspect(make_language(tmp_path, 8))}[
        "rewards that rise while another falls"
    ]
    assert (rewards.outcome, rewards.text) == ("fine", "nothing is seen")


def test_the_command_prints_ranks_and_what_was_looked_at(agent: RunDirectory, whence: Any) -> None:
    code, out, _ = whence("findings", agent.path)
    shown = HOSTILE.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
    assert code == 0
    assert "\x1b" not in out  # neither colour in a pipe, nor that of a name
    lines = out.splitlines()
    assert lines[0] == f"1. wrong: Rewards of {shown}."
    assert lines[3] == f"   Round 1, records 1, 3, 5, 7: whence show {agent.path} --record 1"
    assert f"3. unusual: Rewards of {shown}." in lines
    assert lines[-4:] == [
        "What was looked at: 2 wrong, 1 unusual, 2 fine, 3 could not be looked at.",
        f"   Fine: entropy, luck{LONG}.",
        "   Could not be looked at because no healthy run was measured: news.",
        f"   Could not be looked at because it has none of {shown}: images, pixels.",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_wraps_behind_the_margin(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from whence.cli.terminal import print_findings

    terminal = Console(width=width, force_terminal=True, color_system="standard")
    monkeypatch.setattr("whence.cli.terminal.finding_lines.console", terminal)
    finding = Finding("reward", f"Of {LONG}", "more words " * 20, "Look.", "wrong", None, 1, (3,))
    print_findings(
        [Check("pace", "wrong", "", finding), Check("ends " * 40, "fine", "")] + [Check("x", "fine", "")] * 9
    )
    out = capsys.readouterr().out
    assert "\x1b[1;31mwrong\x1b[0m: Of" in out
    first, *others = (line.rstrip() for line in out.replace("\x1b[1;31m", "").replace("\x1b[0m", "").splitlines())
    assert first.startswith("1. wrong: Of")
    assert max(map(len, [first, *others])) <= width
    assert {line[:3] for line in others} == {"   ", "", "Wha"}


def test_json_has_findings_and_checks(agent: RunDirectory, whence: Any) -> None:
    content = json.loads(whence("findings", agent.path, "--json")[1])
    assert [one["rank"] for one in content["findings"]] == ["wrong", "wrong", "unusual"]
    assert content["findings"][0]["p"] == 0.001
    assert content["findings"][0]["next_command"] == f"whence show {agent.path} --record 1"
    assert content["checks"][3] == {"name": "entropy", "outcome": "fine", "text": "nothing is seen"}
    assert len(content["checks"]) == 8


@pytest.mark.parametrize("name", ["mine", "my runs; and yours"])
def test_the_next_command_can_be_given_as_it_is(agent: RunDirectory, tmp_path: Any, name: str, whence: Any) -> None:
    shutil.copytree(agent.path, tmp_path / name)
    program, *arguments = shlex.split(find(tmp_path / name)[0].next_command)
    assert (program, *arguments) == ("whence", "show", str(tmp_path / name), "--record", "1")
    code, out, _ = whence(*arguments, "--continuations", 0, "--env", "CartPole-v1")
    assert code == 0
    assert out.startswith("Record 1 of ")


def test_a_finding_without_records_leads_to_the_page(agent: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.findings.inspection.link_records", lambda mask, evidence: (None, ()))
    assert {one.next_command for one in find(agent)} == {f"whence view {agent.path}"}


@pytest.mark.parametrize(
    ("outcomes", "rank", "code"),
    [
        ("wrong unusual fine", "wrong", 3),
        ("wrong unusual fine", "unusual", 3),
        ("unusual fine", "wrong", 0),
        ("unusual fine", "unusual", 3),
        ("fine", "unusual", 0),
        ("wrong unusual", None, 0),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_rank_fails_the_command(
    agent: RunDirectory, monkeypatch: pytest.MonkeyPatch, whence: Any, outcomes: str, rank: str, code: int, form: Any
) -> None:
    looks = {"wrong": see(9.0), "unusual": see(9.0, most="unusual"), "fine": see(0.1)}
    looks = {name: looks[name] for name in outcomes.split()}
    monkeypatch.setattr("whence.findings.inspection.DETECTORS", looks)
    monkeypatch.setattr("whence.findings.inspection.read_reference", lambda: dict.fromkeys(looks, [1.0] * 20))
    assert [check.outcome for check in inspect(agent)] == outcomes.split()
    _, plain, _ = whence("findings", agent.path, *form)
    options = () if rank is None else ("--fail-on", rank)
    assert whence("findings", agent.path, *form, *options)[:2] == (code, plain)


def test_a_rank_fails_the_command_even_if_it_is_not_printed(
    agent: RunDirectory, monkeypatch: pytest.MonkeyPatch, whence: Any
) -> None:
    unusual, wrong = (Check(rank, rank, "", Finding("reward", "Odd", "Seen.", "Look.", rank)) for rank in RANKS)
    monkeypatch.setattr("whence.cli.commands.findings_command.inspect", lambda run: [*[unusual] * 5, wrong])
    code, out, _ = whence("findings", agent.path, "--fail-on", "wrong")
    assert out.splitlines()[-1] == "   Also wrong: wrong."
    assert code == 3


def test_errors_keep_their_code(tmp_path: Any, whence: Any) -> None:
    code, out, err = whence("findings", tmp_path / "none", "--fail-on", "wrong")
    assert (code, out) == (2, "")
    assert "none is not there" in err


def test_findings_beyond_five_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, whence: Any) -> None:
    looks = {f"look {number}": see(1.0) for number in range(7)}
    monkeypatch.setattr("whence.findings.inspection.DETECTORS", looks)
    monkeypatch.setattr("whence.findings.inspection.read_reference", lambda: dict.fromkeys(looks, [0.0] * 20))
    _, out, _ = whence("findings", make_agent(tmp_path).path)
    assert "5. wrong" in out
    assert "6. wrong" not in out
    assert out.splitlines()[-1] == "   Also wrong: look 5, look 6."


def test_the_page_has_ranks_and_checks(agent: RunDirectory) -> None:
    run = ExploredRun(agent)
    assert [one["rank"] for one in run.list_findings()] == ["wrong", "wrong", "unusual"]
    looked = run.describe_checks()
    assert looked["counts"] == "2 wrong, 1 unusual, 2 fine, 3 could not be looked at"
    assert looked["checks"][-1] == {
        "name": "pixels",
        "outcome": "could not be looked at",
        "text": f"because it has none of {HOSTILE}",
    }


def test_the_page_of_a_damaged_run_says_why_it_could_not_be_looked_at(agent: RunDirectory) -> None:
    agent.round_path("records", 1).write_bytes(b"damaged")
    run = ExploredRun(agent)
    assert run.list_findings() == []
    looked = run.describe_checks()
    assert looked["silence"] == "Nothing could be looked at."
    (check,) = looked["checks"]
    assert (check["name"], check["outcome"]) == ("the run", "could not be looked at")
    assert check["text"].startswith("because it could not be read: ")


def test_detectors_use_one_thread_of_blas_and_the_users_threads_stay(agent, monkeypatch):
    def count() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    if not count():
        pytest.skip("threadpoolctl knows no BLAS of this NumPy, such as Accelerate's")

    def look(evidence: Any) -> Sight:
        seen.append(count())
        return Sight(0.0)

    seen = list[set[int]]()
    monkeypatch.setattr("whence.findings.inspection.DETECTORS", {"pace": Detector(look, 0.0)})
    with threadpool_limits(2, "blas"):
        inspect(agent)
        assert (seen, count()) == ([{1}], {2})

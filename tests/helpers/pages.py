"""Pages made by hand, to the contract between the page and what fills it; no run, no server."""

import base64
import gzip
import io
import json
import math
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image, ImageDraw

from whence.page.content.moment_view import AROUND
from whence.page.templates import SCRIPTS, STYLES, load_template

ASSETS = files("whence.page") / "assets"
ACTIONS = ["nothing", "fire left", "fire main", "fire right"]
EPISODES, LENGTH = 6, 40
HOSTILE = "<img src=x onerror='window.hacked = 1'>"
WORST, BEST = 57, 130
"""Records of the lowest and the highest score of every round."""

LOOKED = {
    "checks": [
        {"name": "kinds of records", "outcome": "wrong", "text": "larger than in any run of 9 healthy environments"},
        {"name": f"rewards{HOSTILE}", "outcome": "fine", "text": "as large in 3 of 9 healthy environments"},
        {"name": "images", "outcome": "could not be looked at", "text": f"because there is no `{HOSTILE}`"},
    ],
    "counts": "1 wrong, 1 fine, 1 could not be looked at",
    "silence": "Nothing stands out: one figure was looked at.",
}
"""What was looked at in a run."""

COLUMNS = [
    {"key": key, "name": name, "about": about, "kind": kind}
    for key, name, about, kind in (
        ("record_id", "record", "The step of training", "number"),
        ("score", "score", "Influence on the target", "score"),
        ("error", "error", "Standard error of the score", "error"),
        ("keep", "kept", "Whether the record trained", "keep"),
        ("step", "step", "Position in the episode", "number"),
        ("action", "action", "", "text"),
        ("advantage", "advantage", "As collected", "number"),
        ("flag", "flag", "", "text"),
        ("info.fuel", "fuel", "", "number"),
        ("reason", "reason", "Why it was dropped", "reason"),
    )
]


def render(page: dict, contents: dict[str, Any], **variables: Any) -> str:
    """The page by its template, with the explorer's scripts and styles and the given rounds by id."""
    style = "\n".join((ASSETS / name).read_text() for name in ("page.css", *STYLES))
    defaults = {
        **{"title": "LunarLander-v3: iif", "subtitle": "Seed 0, 4 of 4 rounds.", "mode": page["mode"]},
        **{"explored": True, "page_json": embed(page), "style": Markup(style), "language": page["kind"] == "responses"},
        "round_scripts": [(name, text if isinstance(text, str) else compress(text)) for name, text in contents.items()],
        **{"figures_json": embed([]), "figures_js": Markup((ASSETS / "figures.js").read_text())},
        "scripts": [Markup((ASSETS / name).read_text()) for name in SCRIPTS],
    }
    return load_template().render(defaults | variables)


def embed(value: Any) -> Markup:
    text = json.dumps(value, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def compress(value: Any) -> str:
    """A round as a file holds it."""
    strip = value["round"]["strip"]
    ids = [after - before for before, after in pairwise([0, *strip["record_ids"]])]
    value = value | {"round": value["round"] | {"strip": strip | {"record_ids": ids}}}
    return base64.b64encode(gzip.compress(json.dumps(value, allow_nan=False).encode())).decode("ascii")


def make_page(*, mode: str = "file", runs: int = 1, rounds: int = 4, kind: str = "steps", **changes: Any) -> dict:
    numbers = list(range(1, rounds + 1))
    series = {
        "round_return": [-200 + 40 * number for number in numbers],
        "dropped_share": [0.125] * rounds,
        "negative_share": [0.4] * rounds,
    }
    shown = {"planned": rounds, "finished": True, "rounds": numbers, "series": series, "columns": COLUMNS} | changes
    commands = {"view": "whence view RUN", "why": "whence why RUN --record {record}"}
    finding = {
        "rank": "wrong",
        "kind": "region",
        "title": f"Fire left harms{HOSTILE}",
        "evidence": "p = 0.01",
        "advice": "Look at `it`.",
    }
    finding |= {"round": 4, "records": [4000 + WORST, 4000 + BEST], "total": 2, "of": EPISODES * LENGTH}
    finding |= {"groups": [["action", "fire left"]]}
    opens = {"round": numbers[-1], "why": "The first finding is about this round."}
    shared = {"actions": ACTIONS, "notes": [], "commands": commands, "opens": opens, "findings": [finding]}
    shared |= {"looked": LOOKED}
    every = [{"label": f"iif, seed {seed}"} | shared | shown for seed in range(runs)]
    return {"mode": mode, "kind": kind, "runs": every}


def draw_frame(number: int) -> str:
    """A picture as a data URI, another for each number."""
    image = Image.new("RGB", (300, 200), (12, 12, 20))
    drawing = ImageDraw.Draw(image)
    drawing.rectangle((0, 160, 300, 200), fill=(230, 230, 230))
    drawing.polygon([(130, 20 + 12 * number), (170, 20 + 12 * number), (160, 45 + 12 * number)], fill=(128, 100, 230))
    data = io.BytesIO()
    image.save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def make_map(text: str = "") -> dict:
    """Two rows of three cells: a blamed step, a praised turn to the right, and something else."""
    shared = {"score": -0.5, "praised": 0.0}
    step = {"side": "worst", "cell": 1, "direction": 1, "turn": 0, "action": f"down{text}", "count": 9}
    turn = {"side": "worst", "cell": 4, "direction": 0, "turn": 1, "action": "right", "count": 1}
    other = {"side": "best", "cell": 4, "direction": 3, "turn": None, "action": "drop", "count": 4}
    arrows = [shared | step, shared | turn | {"praised": 1.0}, shared | other | {"score": 0.25}]
    return {"rows": 2, "cols": 3, "cells": [f"start{text}", "floor", "wall", "hole", "floor", "goal"], "arrows": arrows}


def make_round(number: int, *, text: str = "", first: int = 0, kind: str = "steps") -> dict:
    """What the file embeds of a round: {"round", "details", "pivots"}; `text` stands in every text of the run's."""
    n = EPISODES * LENGTH
    ids = [first + place for place in range(n)]
    scores = [round(0.1 * math.sin(place / 9 + number) * (1 + place % 5 / 5), 4) for place in range(n)]
    scores[WORST], scores[BEST] = -0.9, 0.8
    advantages = [round(20 * math.cos(place / 7), 2) for place in range(n)]
    advantages[WORST] = 75.0
    actions = [f"{ACTIONS[place % 4]}{text}" for place in range(n)]
    dropped = [int(score < -0.15) for score in scores]
    episodes = [
        {**{"id": 10 + k, "env": k % 2, "start": k * LENGTH, "length": LENGTH}, "first_step": 0, "return": -100.0 + k}
        for k in range(EPISODES)
    ]
    steps = [place % LENGTH for place in range(n)]
    order = sorted(range(n), key=scores.__getitem__)
    listed = {"worst": order[:9], "best": order[:-10:-1]}
    frames = {place: [draw_frame(k) for k in range(9)] for place in (listed["worst"][:1] + listed["best"][:1])}

    def moment(place: int) -> dict:
        error = 0.05 if place in (WORST, BEST) else 0.2
        return {
            **{"record": ids[place], "episode": 10 + place // LENGTH, "env": place // LENGTH % 2, "records": 3},
            "step": steps[place],
            **{"first_step": steps[place] - 1, "last_step": steps[place] + 1, "dropped": 2 * dropped[place]},
            **{"score": scores[place], "error": error, "total": 2 * scores[place], "action": actions[place]},
            **{"advantage": advantages[place], "value": -74.0, "return": 1.0, "reward": -0.3},
            **{"significant": abs(scores[place]) > 2 * error},
            "text": f"It. {text}" if kind == "responses" else None,
            "thumb": frames[place][4] if place in frames else None,
        }

    columns = {
        **{"record_ids": ids, "scores": scores, "dropped": dropped, "errors": [0.05] * n, "actions": actions},
        **{"steps": steps, "rewards": [-0.3] * n, "values": [-74.0 + place / 5 for place in range(n)]},
        "advantages": advantages,
    }

    def cut_window(place: int) -> dict:
        episode = place - place % LENGTH
        first, end = max(episode, place - AROUND), min(episode + LENGTH, place + AROUND + 1)
        return {name: values[first:end] for name, values in columns.items()}

    def detail(place: int) -> dict:
        found = place in frames
        language = {"prompt": f"Say it. {text}", "response": f"It. {text}", "reward": 1.0}
        return (language if kind == "responses" else {}) | {
            **{"record": ids[place], "round": number, "episode": 10 + place // LENGTH, "step": steps[place]},
            **{"env": place // LENGTH % 2},
            **{"action": actions[place], "dropped": bool(dropped[place]), "weight": None, "window": cut_window(place)},
            "reason": f"too low {text}" if dropped[place] else None,
            "state": [{"name": f"height{text}", "value": 0.25}, {"name": "legs", "value": f"none{text}"}],
            "policy": {
                "kind": "discrete",
                "labels": ACTIONS,
                "before": [0.1, 0.2, 0.3, 0.4],
                "after": [0.3, 0.5, 0.1, 0.1],
            },
            "metrics": [{"name": f"fuel{text}", "value": 0.25}],
            **{"value_before": -74.0, "value_after": -60.5, "advantage": advantages[place]},
            **{"mc_advantage": -21.0 if found else None, "mc_error": 4.0 if found else None},
            "mc_text": f"16 rollouts each. {text}" if found else "",
            "targets": [{"name": "return", "score": scores[place], "error": 0.05, "significant": True}],
            "frames": {
                **{"steps": [steps[place] + k for k in range(-4, 5)], "face": 4, "width": 300, "height": 200},
                "images": frames[place],
            }
            if found
            else None,
            "frames_note": None if found else f"whence view RUN shows the frames. {text}",
        }

    rows = [
        {
            **{"record_id": ids[p], "score": scores[p], "error": 0.05, "keep": not dropped[p], "step": steps[p]},
            **{"action": actions[p], "advantage": advantages[p], "info.fuel": p / 4},
            **{"reason": f"too low {text}" if dropped[p] else None, "flag": f"⚑ {text}" if p == WORST else None},
            **{"differs": p in (WORST, BEST), "groups": {"action": f"{ACTIONS[p % 4]}{text}"}},
        }
        for p in order
    ]
    names = [f"{name}{text}" for name in ACTIONS]
    crossed = [[0, 0, 60, -0.15, 0.01, True], [0, 1, 9, 0.1, 0.2, False], [1, 1, 60, 0.05, 0.01, True]]
    crossed.append([2, 0, 1, 0.3, None, None])  # too few episodes for an error
    single = [[place, 0, 60, 0.1 * place - 0.15, 0.01, place != 1] for place in range(4)]
    pivots = {
        "action\nregion": {"rows": names, "columns": [f"x < 1{text}", "x ≥ 1"], "cells": crossed},
        "action": {"rows": names, "columns": None, "cells": single},
    }
    shown = {
        **{"round": number, "records": n, "scored": True, "notes": [f"A note. {text}"] if text else []},
        "trust": [
            {"level": "fair", "text": f"61% of the scores are beyond two errors. {text}"},
            {"level": "unknown", "text": "The scores come without standard errors."},
        ],
        "strip": {"episodes": episodes, "record_ids": ids, "scores": scores, "dropped": dropped},
        **{end: [moment(place) for place in places] for end, places in listed.items()},
        "groupings": [{"key": "action", "name": "action"}, {"key": "region", "name": f"region{text}"}],
        "rows": rows,
        "map": make_map(text) if kind == "steps" else None,
    }
    places = [*listed["worst"], *listed["best"]]
    return {
        "round": shown,
        "details": {str(ids[place]): detail(place) for place in places},
        "pivots": pivots,
    }


def list_responses(text: str) -> list[dict]:
    """Three responses to one prompt."""

    def respond(record: int, score: float, reward: float) -> dict:
        shown = {"record": record, "response": f"Say it.\n{text}", "score": score, "reward": reward}
        return shown | {"advantage": reward - 0.5, "dropped": score < 0, "error": 0.05, "weight": 1.0}

    return [respond(BEST, 0.8, 1.0), respond(WORST, -0.9, 0.0), respond(7, -0.1, 0.0)]


def make_language_round(number: int, *, text: str = "") -> dict:
    """What the file embeds of a round of responses; the worst, the best and a third answer one prompt."""
    content = make_round(number, text=text, kind="responses")
    responses = list_responses(text)
    for response in responses[:2]:
        content["details"][str(response["record"])] |= response
    turns = [
        {"role": "user", "text": f"Say it. {text}"},
        {"role": f"tool{text}", "text": "", "calls": [f"add({text})"]},
    ]
    tokens = {"texts": ["It.", f" {text}"], "log_probs": [-0.1, -3.0], "entropies": [0.5, None]}
    content["details"][str(BEST)] |= {"turns": {"prompt": turns, "response": None}, "tokens": tokens}
    content["round"]["prompts"] = [
        {"prompt": f"Say it. {text}", "records": [BEST, WORST, 7], "responses": 3, "reward": 0.3, "reward.vowels": 0.25}
    ]
    opened = [{name: value for name, value in one.items() if name != "response"} for one in responses]
    opened[2] = responses[2]  # which is no moment, so the group has its text
    return content | {"groups": [{"responses": opened, "total": 4}]}


def make_answers(text: str) -> dict:
    """Answers to two prompts at three checkpoints; the second prompt's reward changed more."""

    def answer(number: int, said: str, reward: float) -> dict:
        answers = [{"text": f"a{text}", "reward": 0.0}, {"text": f"{said}{text}", "reward": reward}]
        return {"run": f"ppo{text}", "round": number, "answers": answers}

    return {"prompts": [f"p{text}", f"q{text}"], "sources": [answer(0, "b", 0), answer(1, "b", 0), answer(2, "c", 1)]}


def write_file(path: Path, page: dict, contents: dict[str, Any], **variables: Any) -> Path:
    path.write_text(render(page, contents, **variables), encoding="utf-8")
    return path

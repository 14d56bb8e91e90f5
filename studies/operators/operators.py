"""The operators: what each plants, how large, where it can be planted, and what a line must say to name it.

The patterns were written before the wording of any finding was settled. All patterns of an operator must be in a line,
whatever the case. They are permissive on words and strict on what is wrong. None demands the place, which is in the
run's touched.json.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from studies.operators import faults, views

REWARD = r"reward|\bpaid|\bpays?\b|payment"
SEEN = r"observation|\bentry|\bentries|feature|column|channel|input"
ACTION = r"\baction|\baxis|\baxes"
COPY = r"\bcopy|\bcopies|environment|env_index|worker|\benvs?\b"
LATE = r"late|delay|lag|behind|steps? (after|before)|earlier|previous|\bold\b"
FROZEN = r"never|constant|frozen|stuck|always|no information|not (change|vary)|same|stops?|identical"
HUGE = r"spike|outlier|huge|extreme|largest|times (as|the)|jump|enormous|beyond|\bfar\b|single|\bfew\b"
CHANGED = r"chang|from round|since|shift|drift|revers|drop|differ|\bhalf|stops?\b|until|later|jump"
SCALE = r"scale|large|huge|magnitude|normali[sz]|\bbig|explod|times (as|the)"
ENDS = r"episode|terminat|\bends?\b|\bended|\bdone\b"
EARLY = r"early|earlier|prematur|sooner|too soon|more often|unexpected|\bcut\b|where|when|short"
FEW = r"few|short|small|more|raise|longer|larger|higher|increase"
HIGH = r"too (long|large|high|far|big|much)|lower|reduce|smaller|shorter|decrease"
LOW = r"too (short|small|low|little)|raise|higher|larger|increase"


class Operator(NamedTuple):
    """What plants a fault.

    Attributes:
        sizes: the default size, then others for a curve of power.
        patterns: all of these are in a line that names the fault.
        fault: the class of the fault; None: a setting.
        setting: the argument of PPO that gets the size.
        needs: traits that the environment must have; see `list_traits`.
        about: what a fault changes: "reward", "observation", "action", "episode" or "setting".
    """

    sizes: Sequence[float]
    patterns: Sequence[str]
    fault: type[faults.Fault] | None = None
    needs: str = ""
    about: str = ""
    setting: str = ""

    def is_named(self, line: str) -> bool:
        """Return whether a line names the fault."""
        return bool(self.patterns) and all(re.search(pattern, line, re.IGNORECASE) for pattern in self.patterns)


def _setting(setting: str, sizes: Sequence[float], *patterns: str) -> Operator:
    return Operator(sizes, patterns, about="setting", setting=setting)


RATE = r"learning.?rate|\blr\b|step size"
REPEATED = r"stale|repeat|same|identical|unchanged|again|frozen|not (change|updat)|equal|delay|behind|previous"
WRONG_SIGN = r"\bsign|negated|opposite|revers|flipp|invert|wrong way|contrary|against"
EXCHANGED = r"swap|exchang|mix|each other|does what|do what|acts? (as|like)|opposite|revers|invert|flipp|mirror|wrong"
LOST = r"lost|unpaid|not paid|never|missing|nothing|\bno\b|zero|\b0\b|withheld|less|too (little|low)|below"
EMPTY = r"zero|\b0\b|blank|empty|missing|dropp?ed|dropout|dropping|black|lost"

OPERATORS: Mapping[str, Operator] = {
    "none": Operator([0.0], []),
    "sign": Operator([0.2, 0.02, 0.05, 0.5], [REWARD, WRONG_SIGN], faults.Sign, "place", "reward"),
    "unpaid": Operator([0.2, 0.02, 0.05, 0.5], [REWARD, LOST], faults.Unpaid, "place", "reward"),
    "swap": Operator([0.2, 0.02, 0.05, 0.5], [ACTION, EXCHANGED], faults.Swap, "place two", "action"),
    "copy-swap": Operator([1.0, 0.1, 0.25, 0.5], [ACTION, EXCHANGED], faults.CopySwap, "two", "action"),
    "delay": Operator([2, 1, 4, 8], [ACTION, LATE], faults.Delay, "", "action"),
    "late-reward": Operator([1, 2, 4, 8], [REWARD, LATE], faults.LateReward, "", "reward"),
    "late-observation": Operator([1, 2, 3, 5], [SEEN, f"{LATE}|stale"], views.LateObservation, "", "observation"),
    "stale": Operator([0.2, 0.02, 0.05, 0.5], [SEEN, REPEATED], views.Stale, "", "observation"),
    "frozen": Operator([1, 2, 3, 5], [SEEN, FROZEN], views.Frozen, "vector place", "observation"),
    "zero": Operator([1, 2, 3, 5], [SEEN, f"{FROZEN}|zero|\\b0\\b"], views.Zero, "vector place", "observation"),
    "copy-frozen": Operator([0.5, 0.1, 0.25, 0.75], [SEEN, FROZEN], views.CopyFrozen, "vector place", "observation"),
    "clip": Operator(
        [0.2, 0.05, 0.5, 0.8], [SEEN, r"clip|saturat|bound|pile|limit|\bcut|\bcap"], views.Clip, "vector", "observation"
    ),
    "dropout": Operator([0.1, 0.01, 0.03, 0.3], [SEEN, EMPTY], views.Dropout, "vector", "observation"),
    "entry-dropout": Operator([0.1, 0.01, 0.03, 0.3], [SEEN, EMPTY], views.EntryDropout, "vector place", "observation"),
    "limit-as-end": Operator(
        [1.0, 0.1, 0.3, 0.6], [r"limit|truncat|time.?out|horizon", ENDS], faults.LimitAsEnd, "limit", "episode"
    ),
    "short-limit": Operator(
        [0.5, 0.25, 0.75, 1.0],
        [ENDS, r"limit|truncat|fixed|(same|one|equal) (length|number)|short|(after|at) (exactly )?\d+ steps|\d+ steps"],
        *(faults.ShortLimit, "", "episode"),
    ),
    "early-end": Operator([0.2, 0.02, 0.05, 0.4], [ENDS, EARLY], faults.EarlyEnd, "place", "episode"),
    "random-end": Operator(
        [0.05, 0.003, 0.01, 0.02],
        [ENDS, r"random|chance|unrelated|anywhere|without|early|earlier|prematur|sooner|unexpected|short"],
        *(faults.RandomEnd, "", "episode"),
    ),
    "reward-spike": Operator([3, 1, 10, 30], [REWARD, HUGE], faults.RewardSpike, "", "reward"),
    "observation-spike": Operator([10, 1, 3, 30], [SEEN, HUGE], views.ObservationSpike, "floats place", "observation"),
    "reward-change": Operator([2.0, 0.2, 0.5, 1.0], [REWARD, CHANGED], faults.RewardChange, "", "reward"),
    "observation-shift": Operator(
        [3.0, 0.5, 1.0, 10.0], [SEEN, CHANGED], views.ObservationShift, "floats place", "observation"
    ),
    "observation-scale": Operator(
        [9.0, 0.5, 1.0, 99.0], [SEEN, f"{CHANGED}|scale"], views.ObservationScale, "floats place", "observation"
    ),
    "episodes-shrink": Operator(
        [0.5, 0.1, 0.25, 0.75],
        [ENDS, r"short|shrink|(one|single|\b1) step|at once|immediate|done flag|not reset|length"],
        *(faults.EpisodesShrink, "", "episode"),
    ),
    "copy-reward": Operator([9.0, 0.5, 1.0, 99.0], [COPY, REWARD], faults.CopyReward, "", "reward"),
    "copy-observation": Operator(
        [9.0, 0.5, 1.0, 99.0], [COPY, SEEN], views.CopyObservation, "floats place", "observation"
    ),
    "paid-again": Operator(
        [1.0, 0.1, 0.3, 3.0],
        [REWARD, r"twice|again|second time|repeat|double|first (step|reward|record)|reset|\bstart|begin|after the end"],
        *(faults.PaidAgain, "", "reward"),
    ),
    "unscaled-reward": Operator([1e5, 1e1, 1e2, 1e3], [REWARD, SCALE], faults.UnscaledReward, "", "reward"),
    "unscaled-observation": Operator(
        [1e4, 1e1, 1e2, 1e3], [SEEN, SCALE], views.UnscaledObservation, "floats place", "observation"
    ),
    "no-reward": Operator(
        [1.0, 0.5, 0.8, 0.95],
        [REWARD, r"never|\bno\b|zero|\b0\b|none|nothing|constant|always|same|equal|not vary"],
        *(faults.NoReward, "", "reward"),
    ),
    "constant": Operator([1.0, 0.3, 0.6, 0.9], [SEEN, f"{FROZEN}|equal"], views.Constant, "place", "observation"),
    "same-seed": Operator(
        [1.0, 0.3, 0.6, 0.9],
        [r"seed|reset|\bstart|first observation|episodes? begin", r"same|identical|repeat|equal|again|only|never"],
        *(faults.SameSeed, "starts repeats", "episode"),
    ),
    "noise": Operator(
        [3.0, 0.1, 0.3, 1.0],
        [SEEN, r"nois|random|unpredict|irrelevant|jump|erratic|uncorrelat"],
        *(views.Noise, "floats place", "observation"),
    ),
    "dead-stretch": Operator(
        [0.5, 0.1, 0.25, 0.75],
        [ACTION, r"no effect|dead|nothing|same|ignored|saturat|clip|not (matter|change)|without effect|range|flat"],
        *(faults.DeadStretch, "bounded", "action"),
    ),
    "wide-range": Operator(
        [3000.0, 10.0, 100.0, 1000.0],
        [ACTION, r"range|scale|wide|large|bound|normali[sz]|narrow|small|deviation"],
        *(faults.WideRange, "bounded", "action"),
    ),
    "rate-low": _setting("learning_rate", [1e-7, 1e-6, 1e-5, 3e-5], RATE, LOW),
    "rate-high": _setting("learning_rate", [3e-2, 3e-3, 1e-2, 1e-1], RATE, HIGH),
    "gamma": _setting("gamma", [0.5, 0.3, 0.8, 0.9], r"gamma|γ|discount", FEW),
    "short-rounds": _setting("n_steps", [16, 8, 32, 64], r"n_steps|rollout|round", FEW),
    "entropy": _setting("ent_coef", [1.0, 0.1, 0.3, 3.0], r"entropy|ent_coef", HIGH),
}
"""The operators by name, in the order of their training."""

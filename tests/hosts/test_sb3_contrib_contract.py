"""What whence relies on in sb3-contrib beyond its documentation."""

from sb3_contrib import RecurrentPPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

from helpers.contracts import check_each, takes
from helpers.toys import model
from whence.sb3.models.recurrent import STATES

TOY = model(RecurrentPPO, n_envs=2)

PRIVATE = {
    "_last_lstm_states": lambda: [each.shape for pair in TOY._last_lstm_states for each in pair] == [(1, 2, 8)] * 4,
    "_process_sequence": lambda: takes(
        RecurrentActorCriticPolicy._process_sequence, "features lstm_states episode_starts lstm"
    ),
    "_predict": lambda: takes(MaskableActorCriticPolicy._predict, "observation deterministic action_masks"),
}

test_private = check_each(PRIVATE)


def test_the_states_of_a_recurrent_buffer() -> None:
    # Steps, layers, environments, units.
    assert [getattr(TOY.rollout_buffer, name).shape for name in STATES] == [(32, 1, 2, 8)] * 4

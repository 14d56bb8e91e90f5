"""What whence reads of sb3-contrib where it is installed; elsewhere stand-ins, which nothing is an instance of."""

from typing import TYPE_CHECKING

try:
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
    from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
    from sb3_contrib.common.maskable.utils import is_masking_supported
except ImportError:
    if not TYPE_CHECKING:

        class _Missing:
            """Nothing is an instance of it."""

        MaskablePPO = RecurrentPPO = MaskableActorCriticPolicy = _Missing
        MaskableDictRolloutBuffer = MaskableRolloutBuffer = _Missing

        def is_masking_supported(env):
            """Never called: there is no MaskablePPO without sb3-contrib."""
            raise NotImplementedError


__all__ = [
    "MaskableActorCriticPolicy",
    "MaskableDictRolloutBuffer",
    "MaskablePPO",
    "MaskableRolloutBuffer",
    "RecurrentPPO",
    "is_masking_supported",
]

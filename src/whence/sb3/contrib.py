"""sb3-contrib's names that whence uses. If it is not installed, they are placeholders without instances."""

from typing import TYPE_CHECKING

try:
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
    from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
    from sb3_contrib.common.maskable.utils import is_masking_supported
except ImportError:
    if not TYPE_CHECKING:

        class _Missing:
            """A placeholder, of which there is no instance."""

        MaskablePPO = RecurrentPPO = MaskableActorCriticPolicy = _Missing
        MaskableDictRolloutBuffer = MaskableRolloutBuffer = _Missing

        def is_masking_supported(env):
            """Return False: there is no MaskablePPO without sb3-contrib."""
            return False


__all__ = [
    "MaskableActorCriticPolicy",
    "MaskableDictRolloutBuffer",
    "MaskablePPO",
    "MaskableRolloutBuffer",
    "RecurrentPPO",
    "is_masking_supported",
]

"""What whence relies on in Transformers beyond its documentation."""

from transformers import Trainer

from helpers.contracts import check_each, takes
from helpers.language_training import make_model

PRIVATE = {
    "_attn_implementation": lambda: make_model().config._attn_implementation in ("sdpa", "eager"),
    "_experts_implementation": lambda: hasattr(make_model().config, "_experts_implementation"),
    "_name_or_path": lambda: make_model().config._name_or_path == "",
    "_load_from_checkpoint": lambda: takes(Trainer._load_from_checkpoint, "resume_from_checkpoint model"),
}

test_private = check_each(PRIVATE)

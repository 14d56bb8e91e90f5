"""The laboratories as tasks: what `whence llm train --task` trains on."""

import math
from typing import Any

from whence.lab.language.evaluation import evaluate
from whence.lab.language.laboratory import arithmetic
from whence.lab.language.pretrained import smollm2
from whence.lab.language.problems import lenient_reward
from whence.stored.language import LanguageConfig, Task, load_language_model, prepare_test


def load_laboratory(config: LanguageConfig) -> Task:
    """Return the task of a laboratory, which is made where it is not on disk."""
    small = config.has_small_model
    lab = arithmetic(size=config.size, progress=False) if small else smollm2(config.size)
    model, tokenizer = load_language_model(str(lab.model_path), config.dtype)
    if not small:
        test = prepare_test(config, lab.test, lab.reward)
        return Task(model, tokenizer, lab.train, lab.reward, lab.demonstrations, *test)
    problems = list(lab.test["prompt"][: config.test_problems])
    sampling = {"samples": config.samples, "seed": config.seed, "max_new_tokens": lab.max_new_tokens}

    def evaluate_model(model: Any, tokenizer: Any) -> dict[str, float]:
        measures = evaluate(model, tokenizer, problems, batch_size=256, **sampling)
        share = measures["exact_match"]
        return {"test_return": share, "standard_error": math.sqrt(share * (1 - share) / len(problems)), **measures}

    reward = lenient_reward if config.task == "loophole" else lab.reward
    return Task(model, tokenizer, lab.train, reward, lab.demonstrations, lab.test, evaluate_model)

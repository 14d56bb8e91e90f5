"""Scores and moments in the host's logger."""

import importlib.util

import numpy as np
import polars as pl
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Image, KVWriter, Logger

from whence import IIF, Unsupported
from whence.sb3 import InfluenceCallback
from whence.sb3.moment_log import draw_scores, format_moments


class Fake(KVWriter):
    """It stands for TensorBoard's output: it gets what is not excluded for it."""

    def __init__(self, name):
        self.name, self.values = name, {}

    def write(self, key_values, key_excluded, step=0):
        self.values |= {
            name: value for name, value in key_values.items() if self.name not in (key_excluded[name] or ())
        }

    def close(self):
        pass


def learn(**settings):
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=128, batch_size=64, n_epochs=1, seed=0, device="cpu")
    formats = [Fake(name) for name in ("tensorboard", "stdout", "log", "json", "csv")]
    model.set_logger(Logger(folder=None, output_formats=formats))
    model.learn(256, callback=InfluenceCallback(IIF(), **settings))
    return model, formats


class TestLoggedImages:
    def test_off_by_default(self):
        assert not {"influence/moments", "influence/scores"} & learn()[1][0].values.keys()

    def test_tensorboard_gets_a_picture_and_a_table_and_text_formats_do_not(self):
        plain, _ = learn()
        model, (tensorboard, *others) = learn(log_images=True)
        picture = tensorboard.values["influence/scores"]
        assert isinstance(picture, Image)
        assert picture.dataformats == "HWC"
        assert picture.image.shape == (360, 640, 3)
        assert "| record | episode | steps |" in tensorboard.values["influence/moments"]
        for other in others:
            assert not {"influence/moments", "influence/scores"} & other.values.keys()
            assert "influence/mean" in other.values
        for one, same in zip(model.policy.parameters(), plain.policy.parameters(), strict=True):
            assert torch.equal(one, same)

    def test_equal_scores_have_a_picture_too(self):
        table = pl.DataFrame({"record_id": [0, 1], "score": [0.0, 0.0], "keep": [True, False]})
        assert draw_scores(table, 1).dtype == np.uint8
        assert format_moments(table, 1) == "Round 1: no record scores below 0."

    def test_without_matplotlib_it_is_refused_at_once(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(Unsupported, match="draws with Matplotlib"):
            InfluenceCallback(IIF(), log_images=True)

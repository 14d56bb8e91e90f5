"""Episodes of a run played again."""

from pathlib import Path

from whence.experiments.rl.rebuilding import AnyEnv, is_squashed, make_replay_env, reads_raw_observations
from whence.runs import RunDirectory
from whence.sb3.episodes.episode_replay import (
    EpisodeReplay,
    Frames,
    play_again,
    read_episode,
)
from whence.sb3.episodes.frames import draw_episode


def replay_episode(
    run: RunDirectory | str | Path,
    episode: int,
    *,
    env: AnyEnv = None,
    frames: Frames = (),
    last_step: int | None = None,
) -> EpisodeReplay:
    """Play an episode of a run again, check it bit for bit against what was stored, and draw steps of it.

    The episode begins from its environment's stored generator state, and takes the stored actions. Episodes without
    such a state, as EnvPool's, are drawn from their observations where the state follows from these. Global random
    generators are left as they are.

    Args:
        run: the run, or its directory.
        episode: the episode's id, as in the records.
        env: an id, module:Id, or a function that makes an environment like those that were trained in; None: what the
            run's configuration names.
        frames: the steps to draw, or "all".
        last_step: the last step to play; None: all that are stored.

    Raises:
        ReplayError: the episode cannot be played again; the message says what is missing.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    stored = read_episode(run, episode)
    make_env = make_replay_env(run, env)
    if stored.generator_state is None and run.experiment.get("collect_with") == "envpool":
        return draw_episode(make_env, stored, frames=frames, last_step=last_step)
    return play_again(
        make_env,
        stored,
        frames=frames,
        last_step=last_step,
        squashed=is_squashed(run),
        raw_observations=reads_raw_observations(run),
    )

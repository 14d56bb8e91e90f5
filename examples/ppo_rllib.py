"""RLlib's PPO (new API stack), trained on the records that whence keeps; docs/guide/loops.md explains it.

A connector behind RLlib's last one has obs, actions, action_logp and value_targets; its advantages are normalised:
whence gets value_targets - values. RLlib adds a row to each episode, which loss_mask marks: such rows stay, and have no
loss. Refused: recurrent modules. Not covered: several agents, more than one learner.
"""

import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2

from whence import IIF, ModuleView, Outputs, PPOClip, RecordBatch, Run


def read_module(module, inputs):
    """Return the log-probabilities of the actions, and the entropies."""
    logits = module.forward_train({"obs": inputs["observations"]})["action_dist_inputs"]
    dist = module.get_train_action_dist_cls().from_logits(logits)
    return Outputs(dist.logp(inputs["actions"]), entropy=dist.entropy())


def note_episode(*, episode, env_runner, env_index, **_):
    """Note of which environment an episode is, and at its end whether it was truncated, as a cut is not."""
    env_index += env_runner.worker_index * env_runner.num_envs
    episode.custom_data.update(env_index=env_index, truncated=episode.is_truncated)


class SelectRows(ConnectorV2):
    """Takes out of a learner's batch what the rule of its attribute `run` drops."""

    def __call__(self, *, rl_module, batch, episodes, **_):
        """Return the batch of the rows to train on."""
        [(module_id, b)] = batch.items()
        module, mask = rl_module[module_id].unwrapped(), b["loss_mask"]
        if module.is_stateful():
            raise ValueError("The rows of recurrent modules are no single records: take another model.")
        rows = [(e, t) for e in episodes for t in range(len(e) - 1)]  # without the rows that RLlib adds
        columns = {"observations": b["obs"], "actions": b["actions"], "log_probs": b["action_logp"]}
        columns |= {"values": (values := module.compute_values(b).detach()), "returns": b["value_targets"]}
        columns |= {"advantages": b["value_targets"] - values, "rewards": b["rewards"]}
        columns = {name: column[mask] for name, column in columns.items()}
        columns["env_index"] = [e.custom_data["env_index"] for e, _ in rows]
        self.records = RecordBatch(**columns, episode_starts=[e.t_started + t == 0 for e, t in rows])
        ends = b["terminateds"][mask], [e.custom_data["truncated"] and t == len(e) - 2 for e, t in rows]
        self.keep = self.run.write_round(ModuleView(module, read_module), self.records, ends=ends).selection.keep
        trains = (~mask).masked_scatter(mask, self.keep)
        return {module_id: tree.map_structure(lambda column: column[trains], b)}


class SelectiveLearner(PPOTorchLearner):
    """PPO's learner, whose last connector is `SelectRows`, with the run that "learner_config_dict" describes."""

    def build(self):
        """Build the learner."""
        super().build()
        self.select = SelectRows()
        self.select.run = self.run = Run(**self.config.learner_config_dict)
        self._learner_connector.append(self.select)


def main(rule=None, rounds=6, path="runs/rllib"):
    """Train on CartPole-v1, print a line and return the learner."""
    config = PPOConfig().environment("CartPole-v1").debugging(seed=0).rl_module(model_config={"fcnet_hiddens": [64]})
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=4, rollout_fragment_length=128)
    config.callbacks(on_episode_created=note_episode, on_episode_end=note_episode)
    config.training(train_batch_size_per_learner=512, minibatch_size=128, num_epochs=4, lr=2e-3, entropy_coeff=0.01)
    objective = PPOClip(config.clip_param, ent_coef=config.entropy_coeff)
    settings = {"rule": rule or IIF(0.25), "objective": objective, "env": "CartPole-v1", "overwrite": True}
    config.learners(learner_class=SelectiveLearner, learner_config_dict={"run": path, **settings})
    algorithm = config.build_algo()
    for _ in range(rounds):
        episodes = algorithm.train()["env_runners"]["num_episodes"]
    [learner] = (result.get() for result in algorithm.learner_group.foreach_learner(lambda learner: learner))
    learner.run.close()
    algorithm.stop()
    keep = learner.select.keep
    print(f"trained on {keep.sum()} of the last {len(keep)} records; {episodes:.0f} episodes ended")
    return learner


if __name__ == "__main__":
    main()

"""skrl's PPO, trained on the records that whence keeps; docs/guide/loops.md explains it.

The memory has observations, actions, log_prob, values, returns; terminated and truncated end episodes. advantages are
normalised: whence gets returns - values. Refused: preprocessors, which change in update(). Not covered: PPO_RNN.
"""

import gymnasium as gym
import torch
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.trainers.torch import SequentialTrainer
from skrl.utils.model_instantiators.torch import categorical_model, deterministic_model

from whence import IIF, ModuleView, Outputs, PPOClip, RecordBatch, Run


def read_policy(policy, inputs):
    """Return the log-probabilities of the actions, and the entropies."""
    _, extra = policy.act({"observations": inputs["observations"], "taken_actions": inputs["actions"]}, role="policy")
    return Outputs(extra["log_prob"].squeeze(-1), entropy=policy.get_entropy(role="policy").squeeze(-1))


class SelectiveMemory(RandomMemory):
    """A memory that samples from the rows that the rule of a run, its attribute `run`, keeps."""

    def set_tensor_by_name(self, name, tensor):
        """Set a column; choose the rows after the last one that update() sets before it samples."""
        super().set_tensor_by_name(name, tensor)
        if name == "advantages":
            policy, cfg, t = self.agent.policy, self.agent.cfg, self.tensors
            if cfg.observation_preprocessor or cfg.value_preprocessor:
                raise ValueError("Preprocessors change in update(), after the records were scored: leave them out.")
            columns = {"observations": t["observations"], "actions": t["actions"], "log_probs": t["log_prob"]}
            columns |= {"advantages": t["returns"] - t["values"], "values": t["values"], "rewards": t["rewards"]}
            self.records, ends = RecordBatch.from_rollout(**columns), (t["terminated"], t["truncated"])
            result = self.run.write_round(ModuleView(policy, read_policy), self.records, ends=ends)
            self.rows = result.selection.keep.nonzero().flatten()

    def sample(self, names, *, mini_batches=1, **_):
        """Return minibatches of kept rows."""
        return self.sample_by_index(names, indexes=self.rows[torch.randperm(len(self.rows))], mini_batches=mini_batches)


def main(rule=None, steps=1280, path="runs/skrl"):
    """Train on CartPole-v1 and print a line."""
    envs = gym.make_vec("CartPole-v1", 4, "sync", vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP})
    spaces = {"observation_space": envs.single_observation_space, "action_space": envs.single_action_space}
    base = spaces | {"network": [{"name": "net", "input": "OBSERVATIONS", "layers": [64], "activations": "tanh"}]}
    models = {"policy": categorical_model(**base, output="ACTIONS"), "value": deterministic_model(**base, output="ONE")}
    cfg = {"rollouts": 128, "mini_batches": 8, "experiment": {"write_interval": 0, "checkpoint_interval": 0}}
    memory = SelectiveMemory(memory_size=128, num_envs=4)
    memory.agent = PPO(models=models, memory=memory, cfg=cfg, **spaces)
    objective = PPOClip(memory.agent.cfg.ratio_clip, ent_coef=memory.agent.cfg.entropy_loss_scale)
    memory.run = Run(path, rule or IIF(0.25), objective=objective, env="CartPole-v1", overwrite=True)
    settings = {"timesteps": steps, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    SequentialTrainer(env=wrap_env(envs, verbose=False), agents=memory.agent, cfg=settings).train()
    memory.run.close()
    print(f"trained on {len(memory.rows)} of {len(memory)} records; {memory.tensors['terminated'].sum()} end episodes")


if __name__ == "__main__":
    main()

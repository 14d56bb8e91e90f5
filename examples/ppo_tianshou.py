"""Tianshou's PPO, trained on the records that whence keeps; docs/guide/loops.md explains it.

A preprocessed batch has obs, act, logp_old, adv (raw), v_s and returns; done marks the ends of episodes. The kept rows
are returned to PPO. Refused: recompute_advantage, which needs the whole buffer. Not covered: recurrence, action masks.
"""

import gymnasium as gym
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

from whence import IIF, ModuleView, Outputs, PPOClip, RecordBatch, Run


def read_policy(policy, inputs):
    """Return the log-probabilities of the actions, and the entropies."""
    dist = policy.dist_fn(policy.actor(inputs["observations"])[0])
    return Outputs(dist.log_prob(inputs["actions"]), entropy=dist.entropy())


class SelectivePPO(PPO):
    """PPO that trains on what the rule of a run, its attribute `run`, keeps of each batch."""

    def _preprocess_batch(self, batch, buffer, indices):
        if self.recompute_adv:
            raise ValueError("recompute_advantage is True; set it False, since it reads dropped records again.")
        batch = super()._preprocess_batch(batch, buffer, indices)
        columns = {"log_probs": batch.logp_old, "advantages": batch.adv, "values": batch.v_s, "returns": batch.returns}
        columns |= {"rewards": batch.rew, "env_index": indices // (len(buffer) // buffer.buffer_num)}
        self.records = RecordBatch(observations=batch.obs, actions=batch.act, **columns)
        ends = batch.terminated, batch.truncated
        self.keep = self.run.write_round(ModuleView(self.policy, read_policy), self.records, ends=ends).selection.keep
        return batch[self.keep.numpy()]


def main(rule=None, rounds=6, path="runs/tianshou"):
    """Train on CartPole-v1, print a line and return the PPO."""
    actor = DiscreteActor(preprocess_net=Net(state_shape=4, hidden_sizes=[64]), action_shape=2, softmax_output=False)
    critic = DiscreteCritic(preprocess_net=Net(state_shape=4, hidden_sizes=[64]))
    policy = DiscreteActorPolicy(actor=actor, action_space=gym.spaces.Discrete(2))
    ppo = SelectivePPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=2e-3), max_grad_norm=0.5)
    objective = PPOClip(ppo.eps_clip, ent_coef=ppo.ent_coef)
    ppo.run = Run(path, rule or IIF(0.25), objective=objective, env="CartPole-v1", overwrite=True)
    collector = Collector(ppo, DummyVectorEnv([lambda: gym.make("CartPole-v1")] * 4), VectorReplayBuffer(512, 4))
    collector.reset(gym_reset_kwargs={"seed": 0})
    policy.is_within_training_step = True  # what Tianshou's trainers set
    for _ in range(rounds):
        episodes = collector.collect(n_step=512).n_collected_episodes
        ppo.update(collector.buffer, batch_size=64, repeat=4)
        collector.reset_buffer(keep_statistics=True)
    ppo.run.close()
    print(f"trained on {ppo.keep.sum()} of the last {len(ppo.keep)} records; {episodes} of them ended episodes")
    return ppo


if __name__ == "__main__":
    main()

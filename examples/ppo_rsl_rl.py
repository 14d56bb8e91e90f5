"""rsl_rl's PPO, trained on the records that whence keeps; docs/guide/loops.md explains it.

The storage has observations, actions, actions_log_prob, values and returns; dones ends episodes. Its advantages are
normalised: whence gets returns - values. Refused: recurrent models and symmetry. Not covered: the losses of RND.
"""

import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict

from whence import IIF, ModuleView, Outputs, PPOClip, RecordBatch, Run


def read_actor(actor, inputs):
    """Return the log-probabilities of the actions, and the entropies."""
    actor(inputs["observations"], stochastic_output=True)
    return Outputs(actor.get_output_log_prob(inputs["actions"]), entropy=actor.output_entropy)


class SelectivePPO(PPO):
    """PPO that trains on what the rule of `run` keeps; a runner makes one by its algorithm's "class_name"."""

    def update(self):
        """Choose the rows, and train on them."""
        if self.actor.is_recurrent or self.symmetry:
            raise ValueError("The rows of recurrent models and of symmetry are no single records: leave them out.")
        st = self.storage
        columns = {"observations": st.observations.to_dict(), "actions": st.actions, "log_probs": st.actions_log_prob}
        columns |= {"advantages": st.returns - st.values, "values": st.values, "rewards": st.rewards}
        self.records = RecordBatch.from_rollout(**columns)
        self.keep = self.run.write_round(ModuleView(self.actor, read_actor), self.records).selection.keep
        rows = RolloutStorage("rl", 1, int(self.keep.sum()), st.observations[0, :1], st.actions_shape, st.device)
        for name in ("observations", "actions", "actions_log_prob", "values", "returns", "advantages"):
            setattr(rows, name, getattr(st, name).flatten(0, 1)[self.keep].unsqueeze(1))
        rows.distribution_params = tuple(p.flatten(0, 1)[self.keep].unsqueeze(1) for p in st.distribution_params)
        st.mini_batch_generator = rows.mini_batch_generator  # where the update draws its minibatches
        return super().update()


def main(rule=None, rounds=10, path="runs/rsl_rl"):
    """Train points to move to 0 in 32 steps, print a line and return the PPO."""
    obs, kinds = TensorDict({"x": torch.randn(4, 1)}, [4]), {"actor": ["x"], "critic": ["x"]}
    actor = MLPModel(obs, kinds, "actor", 1, [64], distribution_cfg={"class_name": "GaussianDistribution"})
    ppo = SelectivePPO(actor, MLPModel(obs, kinds, "critic", 1, [64]), RolloutStorage("rl", 4, 128, obs, [1]))
    objective = PPOClip(ppo.clip_param, ent_coef=ppo.entropy_coef)
    ppo.run = Run(path, rule or IIF(0.25), objective=objective, overwrite=True)
    for step in range(128 * rounds):
        x, done = obs["x"] + 0.1 * ppo.act(obs), torch.full([4], step % 32 == 31)
        obs = TensorDict({"x": torch.where(done[:, None], torch.randn(4, 1), x)}, [4])
        ppo.process_env_step(obs, -x[:, 0].square(), done, {"time_outs": done})
        if step % 128 == 127:
            ppo.compute_returns(obs)
            ppo.update()
    ppo.run.close()
    print(f"trained on {ppo.keep.sum()} of the last {len(ppo.keep)} records; reward: {ppo.storage.rewards.mean():.2f}")
    return ppo


if __name__ == "__main__":
    main()

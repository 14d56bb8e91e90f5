"""TorchRL's PPO loss, trained on the records that whence keeps; docs/guide/loops.md explains it.

After GAE a rollout has observation, action, action_log_prob, advantage (raw), state_value and value_target; is_init, of
InitTracker, is episode_starts. The kept rows fill the replay buffer. Not covered: recurrent modules, MaskedCategorical.
"""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from whence import IIF, ModuleView, Outputs, PPOClip, RecordBatch, Run

KEYS = {"observations": "observation", "actions": "action", "log_probs": "action_log_prob", "advantages": "advantage"}
KEYS |= {"values": "state_value", "returns": "value_target", "rewards": ("next", "reward"), "episode_starts": "is_init"}


def read_actor(actor, inputs):
    """Return the log-probabilities of the actions, and the entropies."""
    dist = actor.get_dist(TensorDict({"observation": inputs["observations"]}, [len(inputs["actions"])]))
    return Outputs(dist.log_prob(inputs["actions"]), entropy=dist.entropy())


def main(rule=None, rounds=8, frames=512, path="runs/torchrl"):
    """Train on CartPole-v1, print a line and return the loss module."""
    network = TensorDictModule(MLP(in_features=4, out_features=2, num_cells=[64]), ["observation"], ["logits"])
    distribution = {"distribution_class": torch.distributions.Categorical, "return_log_prob": True}
    actor = ProbabilisticActor(network, ["logits"], **distribution)
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[64]), ["observation"])
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, normalize_advantage=True)
    optim, gae = torch.optim.Adam(loss_module.parameters(), lr=2e-3), GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    run = Run(path, rule or IIF(0.25), objective=PPOClip(0.2, ent_coef=0.01), env="CartPole-v1", overwrite=True)
    storage, sampler = LazyTensorStorage(frames), SamplerWithoutReplacement()
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), InitTracker())
    env.set_seed(0)
    for rollout in Collector(env, actor, frames_per_batch=frames, total_frames=rounds * frames):
        rows = gae(rollout)
        columns = {name: rows[key].unsqueeze(1) for name, key in KEYS.items()}  # one environment
        records = RecordBatch.from_rollout(**columns)
        ends = rows["next", "terminated"], rows["next", "truncated"]
        keep = run.write_round(ModuleView(actor, read_actor), records, ends=ends).selection.keep
        buffer.empty()
        buffer.extend(rows[keep])
        for batch in (batch for _ in range(4) for batch in buffer):
            losses = loss_module(batch)
            optim.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            optim.step()
    run.close()
    done = rows["next", "done"].sum()
    print(f"trained on {keep.sum()} of the last {len(keep)} records; {done} of them ended episodes")
    return loss_module


if __name__ == "__main__":
    main()

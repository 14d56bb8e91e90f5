"""PPO in one file, in CleanRL's manner, that trains on the records whence keeps; docs/guide/loops.md explains it.

obs, actions, logprobs, advantages (raw), values and returns are (steps, environments); dones are episode_starts.
The rule shortens b_inds, the rows to train on. Not covered: LSTM agents; Gymnasium's resets in steps of their own.
"""

import gymnasium as gym
import torch
from torch import nn

from whence import IIF, ModuleView, Outputs, PPOClip, RecordBatch, Run


def read_agent(agent, inputs):
    """Return newlogprob, newvalue and entropy."""
    pi = torch.distributions.Categorical(logits=agent["actor"](inputs["observations"]))
    return Outputs(pi.log_prob(inputs["actions"]), agent["critic"](inputs["observations"]).squeeze(-1), pi.entropy())


def main(rule=None, rounds=20, num_steps=128, gamma=0.99, gae_lambda=0.95, path="runs/cleanrl"):
    """Train on CartPole-v1, print a line and return the agent."""
    actor, critic = (nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs)) for outputs in (2, 1))
    agent = nn.ModuleDict({"actor": actor, "critic": critic})
    run = Run(path, rule or IIF(0.25), objective=PPOClip(0.2, ent_coef=0.01), env="CartPole-v1", overwrite=True)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    envs = gym.make_vec("CartPole-v1", 4, "sync", vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP})
    next_obs, next_done = torch.as_tensor(envs.reset(seed=0)[0]), torch.ones(4, dtype=torch.bool)
    for _ in range(rounds):
        rollout = []
        for _ in range(num_steps):
            obs, done, action = next_obs, next_done, actor(next_obs).softmax(-1).multinomial(1).squeeze(-1)
            next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
            next_obs, next_done = torch.as_tensor(next_obs), torch.as_tensor(terminated | truncated)
            rollout.append((obs, action, done, *map(torch.as_tensor, (reward.astype("f"), terminated, truncated))))
        obs, actions, dones, rewards, *ended = map(torch.stack, zip(*rollout, strict=True))
        with torch.no_grad():
            logprobs, values, _ = read_agent(agent, {"observations": obs, "actions": actions})
            nextvalues, ends = torch.cat([values[1:], critic(next_obs).T]), torch.cat([dones[1:], next_done[None]])
        advantages = rewards + gamma * nextvalues * ~ends - values
        for t in reversed(range(num_steps - 1)):
            advantages[t] += gamma * gae_lambda * ~ends[t] * advantages[t + 1]
        columns = {"observations": obs, "actions": actions, "log_probs": logprobs, "advantages": advantages}
        columns |= {"values": values, "returns": advantages + values, "rewards": rewards, "episode_starts": dones}
        b = RecordBatch.from_rollout(**columns)
        b_inds = run.write_round(ModuleView(agent, read_agent), b, ends=ended).selection.keep.nonzero().flatten()
        for mb in (mb for _ in range(4) for mb in b_inds[torch.randperm(len(b_inds))].split(128) if len(mb) > 1):
            new = read_agent(agent, {"observations": b.observations[mb], "actions": b.actions[mb]})
            mb_advantages = (b.advantages[mb] - b.advantages[mb].mean()) / (b.advantages[mb].std() + 1e-8)
            ratio = (new.log_prob - b.log_probs[mb]).exp()
            pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * ratio.clamp(0.8, 1.2)).mean()
            loss = pg_loss - 0.01 * new.entropy.mean() + 0.25 * (new.value - b.returns[mb]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    run.close()
    print(f"trained on {len(b_inds)} of the last {len(b)} records; {ends.sum()} of them ended episodes")
    return agent


if __name__ == "__main__":
    main()

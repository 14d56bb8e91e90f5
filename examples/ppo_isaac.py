"""PPO in the manner of Isaac Lab, with thousands of environments as tensors; docs/guide/loops.md explains it.

The environment is one object: its step takes and returns a tensor of all environments, resets what has ended, and has
the terms of its reward in extras["log"]. The run holds records, terms and policy; `KeepAll` leaves them without scores,
and `IIF()` in its place scores, and trains on what it keeps.
"""

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import whence
from whence import KeepAll, ModuleView, Outputs, PPOClip, RecordBatch, Run


class Reach(gym.Env):
    """Points that are pushed to goals on a plane; an episode ends outside of it, and is cut after 5 seconds."""

    def __init__(self, num_envs=4096):
        self.num_envs, self.max_episode_length = num_envs, 100
        self.single_observation_space = gym.spaces.Dict({"policy": gym.spaces.Box(-np.inf, np.inf, (6,))})
        self.single_action_space = gym.spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.state = torch.zeros(num_envs, 6)  # position, velocity, goal
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)

    def observe(self):
        """Return the groups of observations."""
        position, velocity, goal = self.state.split(2, 1)
        return {"policy": torch.cat([goal - position, velocity, position], 1)}

    def reset(self, *, seed=None, options=None):
        """Reset all."""
        self.reset_rows(torch.ones(self.num_envs, dtype=torch.bool))
        return self.observe(), {}

    def reset_rows(self, rows):
        """Put points and goals anywhere."""
        self.episode_length_buf[rows] = 0
        self.state[rows] = 2 * torch.rand(int(rows.sum()), 6) - 1

    def step(self, actions):
        """Push for 50 ms."""
        position, velocity, goal = self.state.split(2, 1)
        velocity += 0.05 * (4 * actions.clamp(-1, 1) - velocity)
        position += 0.05 * velocity
        self.episode_length_buf += 1
        terminated = (position.abs() > 2).any(1)
        truncated = ~terminated & (self.episode_length_buf >= self.max_episode_length)
        distance = (goal - position).norm(dim=1)
        terms = {"tracking": torch.exp(-4 * distance.square()), "effort": -0.01 * actions.square().sum(1)}
        terms |= {"smoothness": -0.01 * velocity.square().sum(1), "termination": -5.0 * terminated}
        reward = sum(terms.values())
        self.reset_rows(terminated | truncated)
        return self.observe(), reward, terminated, truncated, {"log": terms}


def read_agent(agent, inputs):
    """Return log-probabilities, values and entropies."""
    obs = inputs["observations"]
    pi = torch.distributions.Normal(agent["actor"](obs), agent.log_std.exp())
    return Outputs(pi.log_prob(inputs["actions"]).sum(-1), agent["critic"](obs).squeeze(-1), pi.entropy().sum(-1))


def make_agent(hidden=128):
    """Return actor and critic."""

    def make(outputs):
        return nn.Sequential(
            nn.Linear(6, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU(), nn.Linear(hidden, outputs)
        )

    agent = nn.ModuleDict({"actor": make(2), "critic": make(1)})
    agent.log_std = nn.Parameter(torch.zeros(2))
    return agent


def main(rule=None, rounds=20, num_envs=4096, num_steps=24, path="runs/isaac", environments=None):
    """Train points to reach goals, print a line and return the agent; `environments` names a run of their side."""
    envs, agent, gamma, lam = Reach(num_envs), make_agent(), 0.99, 0.95
    if environments is not None:
        envs = whence.record(envs, environments, round=num_envs * num_steps, overwrite=True)
    run = Run(path, rule or KeepAll(), objective=PPOClip(0.2, ent_coef=0.005), overwrite=True)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    obs, start = envs.reset()[0]["policy"], torch.ones(num_envs, dtype=torch.bool)
    for _ in range(rounds):
        rollout, logs = [], []
        for _ in range(num_steps):
            with torch.no_grad():
                action = agent["actor"](obs) + agent.log_std.exp() * torch.randn(num_envs, 2)
            next_obs, reward, terminated, truncated, extras = envs.step(action)
            rollout.append((obs, action, reward, start, terminated, truncated))
            logs.append(extras["log"])
            obs, start = next_obs["policy"], terminated | truncated
        observations, actions, rewards, starts, terminated, truncated = map(torch.stack, zip(*rollout, strict=True))
        terms = {name: torch.stack([log[name] for log in logs]) for name in logs[0]}
        with torch.no_grad():
            log_probs, values, _ = read_agent(agent, {"observations": observations, "actions": actions})
            next_values = torch.cat([values[1:], agent["critic"](obs).T])
        advantages, advantage, goes_on = torch.zeros_like(rewards), 0, ~(terminated | truncated)
        trained = rewards + gamma * truncated * values  # a time limit is no end, as in rsl_rl
        for t in reversed(range(num_steps)):
            delta = trained[t] + gamma * next_values[t] * goes_on[t] - values[t]
            advantages[t] = advantage = delta + gamma * lam * goes_on[t] * advantage
        columns = {"observations": observations, "actions": actions, "log_probs": log_probs, "rewards": rewards}
        columns |= {"advantages": advantages, "values": values, "returns": advantages + values}
        b = RecordBatch.from_rollout(**columns, episode_starts=starts)
        ends = terminated, truncated
        keep = run.write_round(ModuleView(agent, read_agent), b, ends=ends, infos=terms).selection.keep.nonzero()[:, 0]
        for rows in (rows for _ in range(5) for rows in keep[torch.randperm(len(keep))].chunk(4)):
            new = read_agent(agent, {"observations": b.observations[rows], "actions": b.actions[rows]})
            scaled = (b.advantages[rows] - b.advantages.mean()) / (b.advantages.std() + 1e-8)
            ratio = (new.log_prob - b.log_probs[rows]).exp()
            surrogate = torch.min(scaled * ratio, scaled * ratio.clamp(0.8, 1.2)).mean()
            loss = (new.value - b.returns[rows]).square().mean() - surrogate - 0.005 * new.entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
            optimizer.step()
    run.close()
    envs.close()
    print(f"trained on {len(keep)} of the last {len(b)} records; reward: {rewards.mean():.2f}")
    return agent


if __name__ == "__main__":
    main()
